#!/usr/bin/env bash
# Installs SLURM for the tests that bring up a private one, where root runs this on Debian or Ubuntu and there is none.
# None of its daemons is started by that. The tests skip if it does not succeed, so it never fails.
#
#   HPCFED_INSTALL_SLURM    no: leave the system as it is (default: yes)

packages=(slurm-wlm munge libpmix2)
policy=/usr/sbin/policy-rc.d
if command -v sbatch || ! command -v apt-get || [ "$(id -u)" -ne 0 ] || [ "${HPCFED_INSTALL_SLURM:-yes}" = no ]; then
    exit 0
fi > /dev/null

echo "installing ${packages[*]} for the tests on a private SLURM; HPCFED_INSTALL_SLURM=no leaves the system as it is"
if [ ! -e $policy ]; then # what Debian's packages ask before they start a daemon
    trap 'rm -f $policy' EXIT
    printf '#!/bin/sh\nexit 101\n' > $policy && chmod 755 $policy
fi
export DEBIAN_FRONTEND=noninteractive
if ! said=$( (apt-get update && apt-get install -y --no-install-recommends "${packages[@]}") < /dev/null 2>&1); then
    echo "they could not be installed: $(tail -n 1 <<< "$said")"
fi
exit 0
