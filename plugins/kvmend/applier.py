"""Puts fixes in place and takes them off: all sites of a fix or none, read back, under one lock.

Whoever asks twice, from however many threads, gets what asking once gives.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Sequence

from kvmend import settings, voice
from kvmend.counters import Counters
from kvmend.errors import KvmendError, StrictError
from kvmend.fix import Context, Fix, Site
from kvmend.journal import JOURNAL, Entry, Patch
from kvmend.locate import Installation
from kvmend.outcome import Outcome, Result
from kvmend.plan import Plan, make_plan
from kvmend.seams import (
    MARK,
    bypass,
    describe,
    function_of,
    is_original,
    layers,
    like,
    loaded_from,
    module_of,
    parent_of,
    raw_at,
    same_file,
    still_running,
)


class _NotYet(KvmendError):
    """A site does not exist yet: its module is not imported, or still running."""


class _Conflict(KvmendError):
    """Somebody else is at a site, and going over them could not be right."""


def apply(fix: Fix, installation: Installation | None = None) -> Result:
    """Plans and applies one fix in this process.

    Returns:
        The result; `armed` where the modules are not imported yet. Never raises for what a fix or a framework does.
    """
    with JOURNAL.lock:
        entry = JOURNAL.entries.get(fix.id)
        if entry is not None and entry.patches:
            entry.result = _read_back(entry)
            return entry.result
        if entry is not None and entry.result.outcome is Outcome.ARMED:
            return commit(fix.id)
        late = fix.judge_late and not any(module_of(site) for site in fix.sites)
        plan = make_plan(fix, installation=installation, judge_now=not late, by_files=True)
        JOURNAL.entries[fix.id] = Entry(plan=plan, result=plan.result, counters=Counters(fix.counters, fix.may_fall))
        return commit(fix.id) if plan.sites else plan.result


def commit(fix_id: str) -> Result:
    """Wraps the sites of an armed fix if they all exist by now; leaves it armed otherwise."""
    with JOURNAL.lock:
        entry = JOURNAL.entries[fix_id]
        # Judging and wrapper factories may import something, and an import may lead back here.
        if entry.patches or entry.committing or entry.result.outcome is not Outcome.ARMED:
            return entry.result
        if entry.plan.judgement is None and not any(module_of(site) for site in entry.plan.sites):
            return entry.result
        done = entry.doing = []
        entry.committing = True
        try:
            if entry.plan.judgement is None:
                entry.plan = make_plan(entry.plan.fix, by_files=True)
                entry.result = entry.plan.result
                if not entry.plan.sites:
                    return entry.result
            context = _context(entry)
            for site in [each for each in entry.plan.sites if _takes_part(each, entry.plan)]:
                _wrap(site, context, entry.plan.fix, done)
        except _NotYet:
            _roll_back(done)
            return entry.result
        except _Conflict as error:
            _roll_back(done)
            entry.result = dataclasses.replace(entry.result, outcome=Outcome.CONFLICT, reason=str(error), sites=())
        except Exception as error:  # whatever a wrapper factory does wrong, the server goes on without the fix
            stuck = _roll_back(done)
            end = f"; {', '.join(stuck)} could not be put back" if stuck else "; every site was put back"
            reason = f"{type(error).__name__}: {error}{end}"
            entry.result = dataclasses.replace(entry.result, outcome=Outcome.FAILED, reason=reason, sites=())
        except BaseException:
            _roll_back(done)
            raise
        else:
            entry.patches = tuple(done)
            entry.result = dataclasses.replace(entry.result, sites=tuple(patch.site.key for patch in done))
            entry.result = _read_back(entry)
        finally:
            entry.committing = False
        return entry.result


def remove(fix_id: str) -> Result | None:
    """Takes a fix off: every site or none, and only where the object in place is still ours.

    Returns:
        The result: `disabled` once it is off, `conflict` where somebody is over or instead of ours and it stays;
        None if the fix was never applied or armed here.
    """
    with JOURNAL.lock:
        entry = JOURNAL.entries.get(fix_id)
        if entry is None:
            return None
        for patch in entry.patches:
            current = vars(patch.holder).get(patch.name)
            if current is not patch.after:
                reason = f"{patch.site.key} is now {describe(current)}; the fix stays as it is, remove that first"
                entry.result = dataclasses.replace(entry.result, outcome=Outcome.CONFLICT, reason=reason)
                return entry.result
        stuck = _roll_back(entry.patches)
        if stuck:
            reason = f"{', '.join(stuck)} would not be put back; the fix is off everywhere else"
            entry.result = dataclasses.replace(entry.result, outcome=Outcome.CONFLICT, reason=reason)
            return entry.result
        entry.patches = ()
        for undo in reversed(entry.on_removal):
            with contextlib.suppress(Exception):
                undo()
        entry.result = dataclasses.replace(
            entry.result, outcome=Outcome.DISABLED, reason="removed at run time", sites=()
        )
        del JOURNAL.entries[fix_id]
        return entry.result


def results() -> list[Result]:
    """The state of every fix in this process, read back from the objects in place."""
    with JOURNAL.lock:
        for entry in JOURNAL.entries.values():
            if entry.patches:
                entry.result = _read_back(entry)
        return [entry.result for entry in JOURNAL.entries.values()]


def _context(entry: Entry) -> Context:
    plan = entry.plan
    entry.on_removal = []
    return Context(
        mode=plan.result.mode,
        features=frozenset(plan.result.features),
        facts=plan.result.facts,
        counters=entry.counters,
        log=plan.fix.framework.log(),
        check_shadows=functools.partial(_check_shadows, entry),
        on_removal=entry.on_removal,
    )


def _check_shadows(entry: Entry, made: type) -> None:
    """Looks for methods of a class that bypass a fix, while the framework makes its engine.

    Raises:
        StrictError: KVMEND_STRICT=1 and there is one: the fix does not do its job in this engine.
    """
    found: tuple[str, ...] = ()
    strict, fix, log = False, entry.plan.fix.id, entry.plan.fix.framework.log
    try:
        found, new = _shadows(entry, made)
        for text in new:
            voice.log(logging.WARNING, f"kvmend: {fix} {text}", log)
        strict = settings.strict()
    except Exception as error:  # the engine is made all the same
        voice.log(logging.DEBUG, f"kvmend: {fix} could not look at a class", log, error)
    if strict and found:
        raise StrictError(f"{settings.STRICT}=1: {fix} {found[0]}")


def _shadows(entry: Entry, made: type) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Whose methods bypass a fix in a class, in words: all of them, and those that nobody knew of."""
    found, new = [], []
    with JOURNAL.lock:
        for patch in entry.patches:
            if isinstance(patch.holder, type) and issubclass(made, patch.holder):
                name = bypass(made, patch.name, function_of(patch.after))
                if not name:
                    continue
                found.append(f"shadowed_by {name}, which does not call {patch.site.key}: the fix does nothing there")
                if name not in entry.shadowed_by:
                    entry.shadowed_by += (name,)
                    new.append(found[-1])
        if new:
            entry.result = _read_back(entry)
    return tuple(found), tuple(new)


def _takes_part(site: Site, plan: Plan) -> bool:
    """Whether a site can be wrapped; an optional one need not be."""
    raw = raw_at(site)
    if raw is None:
        if module_of(site) is not None and not still_running(site):
            if site.optional:  # another class is in the place of the one that has it
                return False
            raise KvmendError(f"{site.key} is in the installed source but not in the imported module")
        raise _NotYet(site.key)
    judged = next((entry.path for entry in plan.result.evidence if entry.body == site.key), None)
    loaded = loaded_from(site)
    if judged is not None and loaded is not None and not same_file(loaded, judged):
        raise _Conflict(f"{site.module} was imported from {loaded}, the source judged is {judged}")
    function = function_of(raw)
    found = list(layers(function))
    if any(getattr(layer, MARK, None) == plan.fix.id for layer in found):
        raise _Conflict(f"{site.key} already carries {plan.fix.id} from another copy of kvmend")
    if not any(is_original(layer, site) for layer in found):
        if site.optional:
            return False
        raise _Conflict(f"{site.key} was replaced by {describe(function)}, which does not call the original")
    return True


def _wrap(site: Site, context: Context, fix: Fix, done: list[Patch]) -> None:
    """Wraps one site; it is in `done` before it is touched, so that whatever happens can be rolled back."""
    holder, name, raw = parent_of(site), site.qualname.rpartition(".")[2], raw_at(site)
    function = site.wrap(function_of(raw), context)
    if not callable(function) or function is function_of(raw):
        raise KvmendError(f"the wrapper for {site.key} is {function!r}, not a callable of its own")
    setattr(function, MARK, fix.id)
    patch = Patch(site=site, holder=holder, name=name, before=raw, after=like(raw, function))
    done.append(patch)
    setattr(holder, name, patch.after)
    if vars(holder).get(name) is not patch.after:
        raise KvmendError(f"{site.key} did not take the wrapper")


def _roll_back(patches: Sequence[Patch]) -> list[str]:
    """Puts back what was there before; returns the keys of sites that would not have it."""
    stuck = []
    for patch in reversed(patches):
        if vars(patch.holder).get(patch.name) is not patch.before:
            # A holder that refuses one site must not keep the others from being put back.
            with contextlib.suppress(Exception):
                setattr(patch.holder, patch.name, patch.before)
            if vars(patch.holder).get(patch.name) is not patch.before:
                stuck.append(patch.site.key)
    return stuck


def _read_back(entry: Entry) -> Result:
    """The result as the objects in place have them: ours on top, ours beneath another, or ours gone."""
    entry.result = dataclasses.replace(entry.result, shadowed_by=entry.shadowed_by)
    beneath = beside = ""
    for patch in entry.patches:
        holder = parent_of(patch.site)
        if holder is not patch.holder and patch.site.optional:
            beside = f"; {describe(holder)} stands in place of the class at {patch.site.key}"
            continue
        if holder is not patch.holder:
            reason = f"{patch.site.module} was loaded again after kvmend; the fix is on what was there before"
            return dataclasses.replace(entry.result, outcome=Outcome.CONFLICT, reason=reason)
        current = vars(patch.holder).get(patch.name)
        if current is patch.after:
            continue
        ours = function_of(patch.after)
        if any(layer is ours for layer in layers(function_of(current))):
            beneath = f"; beneath {describe(current)} at {patch.site.key}"
        elif patch.site.optional:
            beside = f"; {describe(current)} stands in its place at {patch.site.key}"
        else:
            reason = f"{patch.site.key} was replaced by {describe(current)}, which does not call kvmend's wrapper"
            return dataclasses.replace(entry.result, outcome=Outcome.CONFLICT, reason=reason)
    over = "".join(
        f"; over {describe(patch.before)} at {patch.site.key}"
        for patch in entry.patches
        if not is_original(function_of(patch.before), patch.site)
    )
    shadows = "".join(f"; shadowed_by {name}" for name in entry.shadowed_by)
    reason = entry.plan.result.reason + over + beneath + beside + shadows
    return dataclasses.replace(entry.result, outcome=Outcome.APPLIED, reason=reason)
