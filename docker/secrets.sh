#!/bin/sh
# Make the secrets that compose.yaml mounts, where there are none yet: an API key and Grafana's admin password.
set -eu
umask 077
folder="$(dirname "$0")/secrets"
mkdir -p "$folder"
for name in api_keys grafana_password; do
  if [ ! -s "$folder/$name" ]; then
    head -c 24 /dev/urandom | od -An -tx1 | tr -d ' \n' > "$folder/$name"
    # Services run under user ids of their own and read the file through a mount.
    chmod 0444 "$folder/$name"
    echo "wrote $folder/$name"
  fi
done
chmod 0711 "$folder"
