# docker build -f docs/examples/images/fastdeploy-xpu.Dockerfile --build-arg TAG=2.5.0 -t fastdeploy-xpu:2.5.0-kvmend .
ARG TAG
FROM ccr-2vdh3abv-pub.cnc.bj.baidubce.com/paddlepaddle/fastdeploy-xpu:${TAG}
COPY . /tmp/kvmend
RUN python3 -m pip install --no-cache-dir /tmp/kvmend && rm -rf /tmp/kvmend
# From 2.4 on FastDeploy loads no plugin that is not named here.
ENV FD_PLUGINS=kvmend
ENV KVMEND_STATE_DIR=/run/kvmend
RUN mkdir -p /run/kvmend && kvmend check
