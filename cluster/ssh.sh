#!/usr/bin/env bash
# Hosts over ssh: a hosts file -> checks -> a ClusterSpec -> Ray on all of them -> a script on the first.
#
#   cluster/ssh.sh --check HOSTS              say what is wrong: ports, versions, names, clocks, limits
#   cluster/ssh.sh --profile HOSTS SPEC.json  measure devices and links, for `autopar plan --cluster SPEC.json`
#   cluster/ssh.sh HOSTS SCRIPT.py [ARGUMENT ...]
#
# HOSTS has a line for each host (cluster/hosts.example). The script must be at the same path on the first host. Ray
# ends with the script, also on Ctrl-C; a cluster that stays is `autopar cluster up --hosts HOSTS`.
#
# AUTOPAR: the command (default: autopar). AUTOPAR_FLAGS: more flags, as in "--rsh rsh --env XLA_FLAGS".
set -euo pipefail

usage() {
    sed -n '2,11s/^# \{0,1\}//p' "$0"
    exit 2
}

read -ra autopar <<<"${AUTOPAR:-autopar}"
read -ra flags <<<"${AUTOPAR_FLAGS:-}"

case "${1:-}" in
    --check)
        [ $# -eq 2 ] || usage
        exec "${autopar[@]}" cluster check --hosts "$2" "${flags[@]}"
        ;;
    --profile)
        [ $# -eq 3 ] || usage
        exec "${autopar[@]}" profile --hosts "$2" --out "$3" "${flags[@]}"
        ;;
    "" | -*) usage ;;
esac
[ $# -ge 2 ] || usage

hosts=$1
shift
exec "${autopar[@]}" run --hosts "$hosts" "${flags[@]}" "$@"
