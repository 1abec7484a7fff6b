# Triton with Nereid on a plain Debian: no GPU, no NVIDIA image; the server is the one in the nvidia-pytriton wheel.
#   docker build -f docker/triton-cpu.Dockerfile -t nereid-triton-cpu .
ARG BASE=docker.io/library/debian:12.12-slim
FROM ${BASE}

RUN apt-get update \
 && apt-get install -y --no-install-recommends python3 python3-venv ca-certificates \
 && rm -rf /var/lib/apt/lists/* \
 && useradd --uid 10001 --create-home nereid \
 && install -d -o nereid -g nereid /opt/nereid /cache

USER nereid
WORKDIR /opt/nereid
ENV PATH=/opt/nereid/.venv/bin:$PATH \
    NEREID_CACHE_DIR=/cache/nereid \
    OMP_NUM_THREADS=1 \
    PIP_NO_CACHE_DIR=1 \
    PYTHONDONTWRITEBYTECODE=1

# Packages first: this layer changes only with pyproject.toml and bootstrap.py.
COPY --chown=nereid pyproject.toml README.md bootstrap.py ./
RUN mkdir engine kernels clients \
 && touch engine/__init__.py kernels/__init__.py clients/__init__.py \
 && python3 bootstrap.py run --venv /opt/nereid/.venv

COPY --chown=nereid engine engine
COPY --chown=nereid kernels kernels
COPY --chown=nereid clients clients
COPY --chown=nereid model_repository model_repository
COPY --chown=nereid docker/healthcheck.py docker/healthcheck.py

VOLUME /cache
EXPOSE 8000 8001 8002
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=15s --timeout=12s --retries=3 --start-period=120s \
  CMD ["python3", "/opt/nereid/docker/healthcheck.py"]
ENTRYPOINT ["nereid", "serve"]
CMD ["--model-repository", "/opt/nereid/model_repository"]
