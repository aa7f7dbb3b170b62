#!/usr/bin/env bash
# Kubernetes with the KubeRay operator: checks, starts and ends the cluster of cluster/kuberay.yaml, runs scripts on it.
#
#   cluster/kuberay.sh check                 the operator, the manifest, and the pods that run: versions, names, clocks
#   cluster/kuberay.sh up IMAGE              start it and wait until all pods are ready
#   cluster/kuberay.sh run SCRIPT.py [ARGUMENT ...]      copy a script to the head and run it there
#   cluster/kuberay.sh down
#
# AUTOPAR: the command here (default: autopar). KUBECTL: as in "kubectl --context mine -n training".
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
read -ra autopar <<<"${AUTOPAR:-autopar}"
read -ra kubectl <<<"${KUBECTL:-kubectl}"
label=ray.io/cluster=autopar

problem() {
    echo "$1" >&2
    failed=1
}

pods() { # name and address, the head first
    for kind in head worker; do
        "${kubectl[@]}" get pods -l "$label,ray.io/node-type=$kind" --field-selector=status.phase=Running \
            -o 'jsonpath={range .items[*]}{.metadata.name} address={.status.podIP}{"\n"}{end}'
    done
}

check() {
    failed=
    command -v "${kubectl[0]}" >/dev/null || { echo "${kubectl[0]} is not installed" >&2; exit 1; }
    "${kubectl[@]}" get --raw /readyz >/dev/null || { echo "the Kubernetes cluster cannot be reached" >&2; exit 1; }
    if ! "${kubectl[@]}" get crd rayclusters.ray.io >/dev/null 2>&1; then
        problem "the KubeRay operator is not installed: helm install kuberay-operator kuberay/kuberay-operator"
    elif ! "${kubectl[@]}" explain raycluster.spec.authOptions >/dev/null 2>&1; then
        problem "this KubeRay knows no authOptions, without which Ray asks for no token: 1.5.1 or newer is needed"
    else
        "${kubectl[@]}" apply --dry-run=server -f "$here/kuberay.yaml" >/dev/null || problem "the manifest is refused"
    fi
    hosts=$(mktemp)
    trap 'rm -f "$hosts"' EXIT
    pods >"$hosts" || true
    if [ -s "$hosts" ]; then
        "${autopar[@]}" cluster check --running --hosts "$hosts" --rsh "${kubectl[*]} exec -i {} -c ray --" \
            --python python || failed=1
    else
        echo "no pods run yet: only the cluster was checked" >&2
    fi
    [ -z "$failed" ]
}

up() {
    sed "s|image: IMAGE|image: $1|" "$here/kuberay.yaml" | "${kubectl[@]}" apply -f -
    "${kubectl[@]}" wait --for=jsonpath='{.status.state}'=ready raycluster/autopar --timeout=600s
}

run() {
    head=$("${kubectl[@]}" get pods -l "$label,ray.io/node-type=head" -o 'jsonpath={.items[0].metadata.name}')
    script=$1
    there=/tmp/$(basename "$script")
    shift
    "${kubectl[@]}" exec -i "$head" -c ray -- dd "of=$there" status=none <"$script"
    # the token is in the pod's environment already
    exec "${kubectl[@]}" exec "$head" -c ray -- env RAY_ADDRESS=127.0.0.1:26379 python "$there" "$@"
}

case "${1:-}" in
    check) check ;;
    up)
        [ $# -eq 2 ] || { echo "usage: $0 up IMAGE" >&2; exit 2; }
        up "$2"
        ;;
    run)
        [ $# -ge 2 ] || { echo "usage: $0 run SCRIPT.py [ARGUMENT ...]" >&2; exit 2; }
        shift
        run "$@"
        ;;
    down) "${kubectl[@]}" delete -f "$here/kuberay.yaml" --ignore-not-found ;;
    *)
        sed -n '2,9s/^# \{0,1\}//p' "$0"
        exit 2
        ;;
esac
