# Triton with Nereid, for NVIDIA GPUs. Build from the repository's root:
#   docker build -f docker/triton.Dockerfile -t nereid-triton .
# 25.04 and later have the fix for a crash on cancelled gRPC requests (server pull request 8078).
ARG TRITON=nvcr.io/nvidia/tritonserver:25.08-py3
FROM ${TRITON}

# The stub of this image's server runs the image's own Python, so the environment is made with that. A C compiler and
# Python's headers: the kernels' compiler builds the code that launches a kernel when it first meets one.
RUN apt-get update \
 && apt-get install -y --no-install-recommends python3-venv python3-dev gcc libc6-dev \
 && rm -rf /var/lib/apt/lists/* \
 && useradd --uid 10001 --create-home nereid \
 && install -d -o nereid -g nereid /opt/nereid /cache

USER nereid
WORKDIR /opt/nereid
ENV PATH=/opt/nereid/.venv/bin:$PATH \
    NEREID_CACHE_DIR=/cache/nereid \
    TRITON_CACHE_DIR=/cache/triton \
    PYTHONDONTWRITEBYTECODE=1

# Packages first: this layer changes only with pyproject.toml. The empty packages let the editable install see names.
COPY --chown=nereid pyproject.toml README.md ./
RUN mkdir engine kernels clients \
 && touch engine/__init__.py kernels/__init__.py clients/__init__.py \
 && python3 -m venv .venv \
 && .venv/bin/pip install --no-cache-dir torch==2.13.0 \
 && .venv/bin/pip install --no-cache-dir --editable '.[engine,client]'

COPY --chown=nereid engine engine
COPY --chown=nereid kernels kernels
COPY --chown=nereid clients clients
COPY --chown=nereid model_repository model_repository
COPY --chown=nereid docker/healthcheck.py docker/healthcheck.py

VOLUME /cache
EXPOSE 8000 8001 8002
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=15s --timeout=12s --retries=3 --start-period=600s \
  CMD ["python3", "/opt/nereid/docker/healthcheck.py"]
ENTRYPOINT ["nereid", "serve"]
CMD ["--model-repository", "/opt/nereid/model_repository"]
