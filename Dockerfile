# An image with pccl and the examples, made by the commands of the README:
#     docker build -t pccl . && docker run --rm pccl
# It shows the demo. `docker run --rm -p 48148:48148 pccl pccl master --listen 0.0.0.0:48148` is a master; the image of
# peers with torch is in examples/deploy/kubernetes.
FROM python:3.12-slim AS build
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
ENV PIP_NO_CACHE_DIR=1
WORKDIR /pccl
COPY . .
RUN python3 -m venv .venv && .venv/bin/pip install '.[plot]'

FROM python:3.12-slim
# tini is process 1: a container's first process ignores SIGTERM unless it handles it.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends tini \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /pccl
COPY --from=build /pccl/.venv .venv
COPY examples examples
ENV PATH=/pccl/.venv/bin:$PATH
USER 10001:10001
EXPOSE 48148
ENTRYPOINT ["tini", "-g", "--"]
CMD ["pccl", "demo"]
