#!/usr/bin/env bash
# One machine: checks it, starts Ray for a script, and ends Ray with the script.
#
#   cluster/local.sh --check
#   cluster/local.sh SCRIPT.py [ARGUMENT ...]
#
# AUTOPAR: the command (default: autopar). AUTOPAR_FLAGS: more flags of `autopar run`, as in "--port-base 28000".
set -euo pipefail

read -ra autopar <<<"${AUTOPAR:-autopar}"
read -ra flags <<<"${AUTOPAR_FLAGS:-}"

case "${1:-}" in
    "" | -h | --help)
        sed -n '2,7s/^# \{0,1\}//p' "$0"
        exit 2
        ;;
    --check) exec "${autopar[@]}" doctor "${flags[@]}" ;;
esac

exec "${autopar[@]}" run --here "${flags[@]}" "$@"
