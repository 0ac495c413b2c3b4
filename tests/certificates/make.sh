#!/usr/bin/env bash
# Makes the certificates of the TLS tests, all but one valid from 2020 to 2120. They protect nothing: keys are public.
set -euo pipefail
cd "$(dirname "$0")"
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

new_ca() { # name
    openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 36500 -subj "/CN=pccl tests $1" \
        -keyout "$scratch/$1.key" -out "$scratch/$1.crt"
    mkdir -p "$scratch/$1"
    : >"$scratch/$1/index"
    openssl rand -hex 8 >"$scratch/$1/serial"
    cat >"$scratch/$1.cnf" <<CONFIG
[ca]
default_ca = this
[this]
database = $scratch/$1/index
serial = $scratch/$1/serial
new_certs_dir = $scratch/$1
certificate = $scratch/$1.crt
private_key = $scratch/$1.key
default_md = sha256
policy = any
unique_subject = no
[any]
commonName = supplied
[root]
basicConstraints = critical, CA:TRUE
keyUsage = critical, keyCertSign
subjectKeyIdentifier = hash
[leaf]
basicConstraints = CA:FALSE
keyUsage = critical, digitalSignature
authorityKeyIdentifier = keyid
subjectAltName = DNS:localhost, IP:127.0.0.1, IP:::1
CONFIG
    # Once more, to have its dates.
    openssl req -new -key "$scratch/$1.key" -subj "/CN=pccl tests $1" -out "$scratch/$1.csr"
    openssl ca -batch -selfsign -config "$scratch/$1.cnf" -extensions root -startdate 20200101000000Z \
        -enddate 21200101000000Z -in "$scratch/$1.csr" -keyfile "$scratch/$1.key" -notext -out "$1.pem"
    cp "$1.pem" "$scratch/$1.crt"
}

new_leaf() { # ca name enddate
    openssl req -new -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -subj "/CN=pccl tests $2" \
        -keyout "$scratch/$2.key" -out "$scratch/$2.csr"
    openssl ca -batch -config "$scratch/$1.cnf" -extensions leaf -startdate 20200101000000Z -enddate "$3" \
        -in "$scratch/$2.csr" -notext -out "$scratch/$2.crt"
    cat "$scratch/$2.crt" "$scratch/$2.key" >"$2.pem"
}

new_ca ca
new_ca other_ca
new_leaf ca master 21200101000000Z
new_leaf ca expired 20210101000000Z
new_leaf ca client 21200101000000Z
