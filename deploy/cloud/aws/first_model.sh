#!/bin/bash
# Brings the model to an EC2 instance at its first boot (set_up_instance.sh), and prints the value of TERCET_MODELS:
#   first_model.sh MODELS [ARCHIVE [TOKEN_PARAMETER]]
# ARCHIVE is s3://bucket/model.tar.gz with weights of one's own, as SageMaker has them: config.json, model.safetensors
# and tokenizer.json at its top. It is unpacked into ~/model, and served instead of MODELS. TOKEN_PARAMETER is the name
# of a parameter of Systems Manager with a token of the hub, for a private repository in MODELS; it is written nowhere.
set -euo pipefail
models=$1 archive=${2:-} parameter=${3:-}
fail() { echo "tercet: $1" >&2; exit 1; }

if [ -n "$archive" ]; then
  mkdir -p "$HOME/model"
  aws s3 cp "$archive" - | tar -xz -C "$HOME/model" || fail "$archive cannot be unpacked; the reason is above."
  [ -f "$HOME/model/config.json" ] || fail "$archive has no config.json at its top: pack the files, not their folder."
  models=model=$HOME/model
fi
if [ -n "$parameter" ]; then
  HF_TOKEN=$(aws ssm get-parameter --with-decryption --name "$parameter" --query Parameter.Value --output text) ||
    fail "The parameter $parameter cannot be read; the reason is above."
  export HF_TOKEN
fi
# `plan` downloads and checks every model. What it prints is for the log.
TERCET_MODELS=$models python -m deploy plan >&2 || fail "$models cannot be served; the reason is above."
printf '%s\n' "$models"
