# The OpenAI shim and its web page. It needs no GPU, no torch and no Triton.
#   docker build -f docker/openai.Dockerfile -t nereid-openai .
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

COPY --chown=nereid pyproject.toml README.md ./
RUN mkdir engine kernels clients \
 && touch engine/__init__.py kernels/__init__.py clients/__init__.py \
 && python3 -m venv .venv \
 && .venv/bin/pip install --no-cache-dir --editable '.[openai]'

COPY --chown=nereid engine engine
COPY --chown=nereid clients clients

EXPOSE 9000
STOPSIGNAL SIGTERM
ENTRYPOINT ["python3", "-m", "clients.openai"]
CMD ["--host", "0.0.0.0"]
