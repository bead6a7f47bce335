# docker build -f docs/examples/images/vllm.Dockerfile --build-arg TAG=v0.26.0 -t vllm-openai:v0.26.0-kvmend .
ARG TAG
FROM vllm/vllm-openai:${TAG}
COPY . /tmp/kvmend
RUN python3 -m pip install --no-cache-dir /tmp/kvmend && rm -rf /tmp/kvmend
ENV KVMEND_STATE_DIR=/run/kvmend
RUN mkdir -p /run/kvmend && kvmend check
