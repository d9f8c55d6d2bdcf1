#!/bin/sh
# Installs the project from its tree into a clean Debian or Ubuntu, as root:
#
#   sh install.sh TREE
#
# deploy/Dockerfile runs it.
# TREE is only read. What pip and apt-get fetch comes from where they are set up to fetch it.
set -eu
tree=${1:?the folder with pyproject.toml}
home=/opt/dflash-trt
built=$(mktemp -d)

export DEBIAN_FRONTEND=noninteractive
apt-get update
apt-get install -y --no-install-recommends ca-certificates python3 python3-venv tini
# Triton server's Python models are processes that embed Python: they need its library.
apt-get install -y --no-install-recommends \
  "libpython$(python3 -c 'import sys; print("%d.%d" % sys.version_info[:2])')"

python3 -m venv "$home"
"$home/bin/python" -m pip wheel --no-cache-dir --no-deps -w "$built" "$tree"
"$home/bin/python" -m pip install --no-cache-dir -c "$tree/constraints.txt" \
  "$(echo "$built"/dflash_trt-*.whl)[serve]"

# A number of its own, so that an orchestrator can see that it is not root.
groupadd --gid 10001 dflash
useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin dflash
rm -rf "$built" /var/lib/apt/lists/*
