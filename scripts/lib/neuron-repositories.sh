# shellcheck shell=bash
# shellcheck disable=SC2034  # read by the scripts that source this
# AWS's public package repositories of the Neuron SDK: the only place that names them.
# Source: the SDK documentation's install pages (setup, PyTorch, Ubuntu).
NEURON_PIP_INDEX="https://pip.repos.neuron.amazonaws.com"
NEURON_APT_REPOSITORY="https://apt.repos.neuron.amazonaws.com"
NEURON_APT_KEY="$NEURON_APT_REPOSITORY/GPG-PUB-KEY-AMAZON-AWS-NEURON.PUB"
NEURON_APT_KEYRING="/etc/apt/keyrings/neuron.gpg"
NEURON_APT_LIST="/etc/apt/sources.list.d/neuron.list"
NEURON_TOOLS="/opt/aws/neuron/bin"
