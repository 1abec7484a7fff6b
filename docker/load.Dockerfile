# Load tools: locust with the users of perf/load/locustfile.py, and perf_analyzer from the tritonclient wheel.
#   docker build -f docker/load.Dockerfile -t nereid-load .
ARG BASE=docker.io/library/debian:12.12-slim
FROM ${BASE}

RUN apt-get update \
 && apt-get install -y --no-install-recommends python3 python3-venv ca-certificates \
 && rm -rf /var/lib/apt/lists/* \
 && useradd --uid 10001 --create-home nereid \
 && install -d -o nereid -g nereid /opt/nereid

USER nereid
WORKDIR /opt/nereid
ENV PATH=/opt/nereid/.venv/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1

# perf_analyzer wants two libraries that the nvidia-pytriton wheel carries.
COPY --chown=nereid pyproject.toml README.md ./
RUN mkdir engine kernels clients \
 && touch engine/__init__.py kernels/__init__.py clients/__init__.py \
 && python3 -m venv .venv \
 && .venv/bin/pip install --no-cache-dir --editable '.[client]' 'tritonclient[grpc]==2.50.0' 'locust>=2.40' \
 && .venv/bin/pip install --no-cache-dir --no-deps nvidia-pytriton==0.7.0

COPY --chown=nereid engine engine
COPY --chown=nereid clients clients
COPY --chown=nereid perf perf

EXPOSE 8089
ENTRYPOINT ["locust", "-f", "perf/load/locustfile.py"]
CMD ["--host", "http://triton:8000", "--grpc", "triton:8001"]
