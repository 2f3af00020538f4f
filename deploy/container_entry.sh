#!/bin/sh
# Entry point of the container image: puts the kernels that were compiled with the image into the cache, which must be a
# directory that can be written to, and then becomes the command.
set -eu
mkdir -p "$TERCET_CACHE_DIR"
cp -Ru /opt/tercet/kernels/. "$TERCET_CACHE_DIR"
exec "$@"
