#!/usr/bin/env bash
# Root file systems of SWE-Gym's images, one folder an instance_id, for the rows that have none yet.
#   images.sh ROWS.jsonl FOLDER        (needs docker or podman, jq, and a few GB an image)
set -euo pipefail

ROWS=${1:?usage: images.sh ROWS.jsonl FOLDER}
FOLDER=${2:?usage: images.sh ROWS.jsonl FOLDER}
REPOSITORY=${REPOSITORY:-docker.io/xingyaoww/sweb.eval.x86_64}
DOCKER=${DOCKER:-docker}

mkdir -p "$FOLDER"
jq -r .instance_id "$ROWS" | while read -r id; do
    [[ ! -d $FOLDER/$id ]] || continue
    image=$(tr '[:upper:]' '[:lower:]' <<<"$REPOSITORY.${id//__/_s_}:latest")
    partial=$FOLDER/.$id.partial
    rm -rf "$partial"
    mkdir "$partial"
    container=$("$DOCKER" create "$image" true </dev/null)
    "$DOCKER" export "$container" | tar -x --no-same-owner -C "$partial" --exclude='dev/*'
    "$DOCKER" rm "$container" >/dev/null
    [[ ${KEEP_IMAGES:-no} == yes ]] || "$DOCKER" rmi "$image" >/dev/null
    mv "$partial" "$FOLDER/$id"
    echo "$FOLDER/$id"
done
