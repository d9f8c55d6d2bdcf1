# launch.sh GPUS [COMMAND...]: one pod of a LeaderWorkerSet. The leader runs COMMAND on the GPUs of all
# pods by MPI; the others wait for it behind an SSH server. One key, which these pods alone have, is
# the server's and the client's.
set -eu
fail() { echo "error: $1" >&2; exit 1; }
key=/ssh/id gpus=$1
shift
home=$(getent passwd "$(id -u)" | cut -d : -f 6)  # SSH's own, whatever HOME says
mkdir -p "$home/.ssh"

if [ "$LWS_WORKER_INDEX" != 0 ]; then
    sshd=$(command -v sshd || echo /usr/sbin/sshd)
    [ -x "$sshd" ] || fail "this image has no SSH server (openssh-server)"
    # What the leader starts here has this container's variables.
    (umask 077 && env | grep '^[A-Za-z_][A-Za-z_0-9]*=' > "$home/.ssh/environment")
    mkdir -p /run/sshd
    exec "$sshd" -D -e -p 2222 -h "$key" -o AuthorizedKeysFile="$key.pub" -o StrictModes=no \
        -o PasswordAuthentication=no -o PermitRootLogin=prohibit-password \
        -o PermitUserEnvironment=yes -o PidFile=none
fi

command -v ssh >/dev/null || fail "this image has no SSH client (openssh-client)"
mpirun=$(command -v mpirun) || fail "this image has no mpirun"
echo "* $(cut -d ' ' -f 1,2 "$key.pub")" > "$home/.ssh/group"
printf '%s\n' 'Host *' 'Port 2222' "IdentityFile $key" "UserKnownHostsFile $home/.ssh/group" \
    'StrictHostKeyChecking yes' 'BatchMode yes' 'ConnectTimeout 5' > "$home/.ssh/config"
chmod 600 "$home/.ssh/config"

# A pod is called as the leader, with its number behind: set-0-1.set.namespace.
hosts=$(hostname):$gpus index=1 until=$(($(date +%s) + 1800))
while [ "$index" -lt "$LWS_GROUP_SIZE" ]; do
    host=${LWS_LEADER_ADDRESS%%.*}-$index.${LWS_LEADER_ADDRESS#*.}
    until ssh "$host" true; do
        [ "$(date +%s)" -lt "$until" ] || fail "$host does not answer"
        sleep 2
    done
    hosts=$hosts,$host:$gpus index=$((index + 1))
done

# Names stay whole: a pod is found by its service's name behind its own. Open MPI 4 and 5.
export OMPI_MCA_orte_keep_fqdn_hostnames=1 PRTE_MCA_prte_keep_fqdn_hostnames=1
exec "$mpirun" --allow-run-as-root --bind-to none -np $((gpus * LWS_GROUP_SIZE)) -H "$hosts" \
    trtllm-llmapi-launch "$@"
