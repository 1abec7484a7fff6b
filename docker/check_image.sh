#!/bin/sh
# Build the CPU image and the shim's without a Docker engine, start both, and have them answer completions. Needs root,
# buildah and debootstrap (make test-image installs them). The base is a debootstrapped Debian in place of the published
# image.
#   sh docker/check_image.sh [FOLDER FOR THE BASE AND THE IMAGES]
set -eu
cd "$(dirname "$0")/.."
work="${1:-$(mktemp -d)}"
http="${HTTP_PORT:-21780}"
export STORAGE_DRIVER=vfs BUILDAH_ISOLATION=chroot
root="--root $work/storage --runroot $work/run"
mkdir -p "$work"

if [ ! -e "$work/base.ready" ]; then
  debootstrap --variant=minbase --include=ca-certificates bookworm "$work/base"
  touch "$work/base.ready"
fi

# The build asks the package index that this machine asks, with what pip is told here by files and by variables.
python3 -m pip config list | python3 -c '
import re, sys
found = {}
for line in sys.stdin:
    name, value = re.match(r"[^.]*\.([a-z-]+)=(.*)", line).groups()
    if name in ("cert", "index-url", "extra-index-url", "find-links", "trusted-host"):
        found[name] = value.strip("\x27")
print("[global]", *(f"{k} = {v}" for k, v in found.items()), sep="\n")' > "$work/pip.conf"
mounts="--volume $work/pip.conf:/etc/pip.conf:ro"
for path in $(sed -n 's|.*= *||p' "$work/pip.conf" | tr ' ' '\n' | sed -n 's|^file://||; s|/simple$||; s|^/|/|p'); do
  [ -e "$path" ] && mounts="$mounts --volume $path:$path:ro"
done

base=$(buildah $root from scratch)
buildah $root add --quiet "$base" "$work/base" /
buildah $root commit --quiet --squash "$base" localhost/nereid-base > /dev/null
buildah $root rm "$base" > /dev/null
for image in triton-cpu openai; do
  buildah $root bud --layers=false $mounts --build-arg BASE=localhost/nereid-base \
    -f docker/$image.Dockerfile -t nereid-$image .
done

server=$(buildah $root from nereid-triton-cpu)
shim=$(buildah $root from nereid-openai)
buildah $root run "$server" -- nereid serve --model-repository /opt/nereid/model_repository \
  --http-port "$http" --grpc-port $((http + 1)) --metrics-port $((http + 2)) > "$work/log" 2>&1 &
running=$!
echo secret > "$work/api_keys"
chmod 0444 "$work/api_keys"
buildah $root run --volume "$work/api_keys:/run/secrets/api_keys:ro" "$shim" -- python3 -m clients.openai \
  --port $((http + 3)) --triton "127.0.0.1:$((http + 1)):$((http + 2))" --api-key-file /run/secrets/api_keys \
  > "$work/shim.log" 2>&1 &
shim_running=$!
stop() {
  # buildah passes no signal on: the servers themselves are told, by ports that only they were given.
  for pid in $(pgrep -f -- "--http-port=$http|--port $((http + 3))" || true); do kill "$pid" 2>/dev/null || true; done
  wait $running $shim_running 2>/dev/null || true
  buildah $root rm "$server" "$shim" > /dev/null
}
trap stop EXIT
for _ in $(seq 240); do
  if HEALTH_URL="http://127.0.0.1:$http/v2" python3 docker/healthcheck.py > "$work/health" 2>&1; then
    curl -sS "http://127.0.0.1:$http/v2/models/demo/generate" \
      -d '{"text_input": "def read(path):", "sampling_parameters": "{\"max_tokens\": 8, \"temperature\": 0}"}'
    echo
    for _ in $(seq 40); do
      curl -sS "http://127.0.0.1:$((http + 3))/v1/completions" -H "Authorization: Bearer secret" \
        -H "Content-Type: application/json" -d '{"model": "demo", "prompt": "def read(path):", "max_tokens": 8}' \
        > "$work/answer" 2>&1 && grep -q text_completion "$work/answer" && break
      sleep 0.5
    done
    cat "$work/answer"
    echo
    grep -q text_completion "$work/answer" || { tail -20 "$work/shim.log"; exit 1; }
    for container in "$server" "$shim"; do
      user=$(buildah $root run "$container" -- id -u)
      [ "$user" = 10001 ] || { echo "$container runs as user $user"; exit 1; }
    done
    echo "both images were built, run as user $user and answer"
    exit 0
  fi
  kill -0 $running 2>/dev/null || break
  sleep 0.5
done
cat "$work/health"; tail -40 "$work/log"
exit 1
