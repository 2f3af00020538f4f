#!/bin/bash
# Sets up Tercet on an Amazon Linux 2023 instance that runs while there are jobs (lambda-ec2.yaml), as root:
#   set_up_instance.sh TERCET_JOBS TERCET_MODELS TERCET_IDLE_STOP_S TERCET_JOB_TTL_S [MODEL_ARCHIVE [TOKEN_PARAMETER]]
# AWS_DEFAULT_REGION is the region of the archive and of the parameter (first_model.sh).
set -euo pipefail
[ $# -ge 4 ] || { echo "usage: $0 JOBS MODELS IDLE_STOP_S JOB_TTL_S [MODEL_ARCHIVE [TOKEN_PARAMETER]]" >&2; exit 64; }

sources=$(cd "$(dirname "$0")/../../.." && pwd)
dnf install -y make python3.11 python3.11-pip
cd "$sources"
make setup-serve PYTHON=/usr/bin/python3.11 # without a GPU torch's CPU build; TORCH=cuda in the environment overrules that
.venv/bin/pip install --no-cache-dir -e '.[dynamodb]'
.venv/bin/python -m compileall -q -x py312 .venv gateway workers shared deploy
ln -sfn "$sources" /opt/tercet

systemd-sysusers deploy/supervision/systemd/tercet.sysusers.conf
install -m 644 deploy/supervision/systemd/tercet.service deploy/supervision/systemd/tercet.socket /etc/systemd/system/
install -D -m 644 -t /etc/systemd/system/tercet.service.d deploy/cloud/aws/tercet.service.d/aws.conf
install -d -o tercet -g tercet -m 700 /etc/tercet /var/lib/tercet

# The service downloads no model, and knows no token.
cd /opt/tercet
models=$(runuser -u tercet -- env HOME=/var/lib/tercet HF_HOME=/var/lib/tercet/models TERCET_RUN_DIR=/tmp/tercet-fetch \
  PATH="/opt/tercet/.venv/bin:$PATH" bash deploy/cloud/aws/first_model.sh "$2" "${5:-}" "${6:-}")
printf '%s\n' "TERCET_JOBS=$1" "TERCET_MODELS=$models" "TERCET_IDLE_STOP_S=$3" "TERCET_JOB_TTL_S=$4" >/etc/tercet/environment

systemctl daemon-reload
systemctl enable --now tercet.socket
systemctl add-wants multi-user.target tercet.service
systemctl start tercet.service
