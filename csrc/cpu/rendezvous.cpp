#include "cpu/rendezvous.h"

#include <errno.h>
#include <poll.h>
#include <string.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include <chrono>
#include <fstream>
#include <stdexcept>
#include <system_error>

#include "common/errors.h"
#include "common/layout.h"
#include "cpu/channel.h"
#include "cpu/system.h"

namespace coconet {

namespace {

constexpr int64_t kInterruptMs = 50;  // how often a wait looks for Ctrl-C

struct FileDescriptor {
    int fd;
    explicit FileDescriptor(int fd) : fd(fd) {}
    ~FileDescriptor() {
        if (fd >= 0) close(fd);
    }
    FileDescriptor(const FileDescriptor&) = delete;
    FileDescriptor& operator=(const FileDescriptor&) = delete;
    int release() {
        const int result = fd;
        fd = -1;
        return result;
    }
};

// An abstract address starts with a zero byte; the name is 128 random bits, so it is its own
// secret.
socklen_t socket_address(const std::string& name, sockaddr_un* out) {
    memset(out, 0, sizeof *out);
    out->sun_family = AF_UNIX;
    memcpy(out->sun_path + 1, name.data(), name.size());
    return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
}

std::string random_name() {
    unsigned char bytes[16];
    if (getrandom(bytes, sizeof bytes, 0) != sizeof bytes) throw os_error("getrandom");
    std::string name = "coconet-";
    for (const unsigned char b : bytes) {
        name += "0123456789abcdef"[b >> 4];
        name += "0123456789abcdef"[b & 15];
    }
    return name;
}

void send_descriptors(int socket, int rank, const int* fds, int count) {
    char control[CMSG_SPACE(2 * sizeof(int))] = {};
    iovec data{&rank, sizeof rank};
    msghdr message{};
    message.msg_iov = &data;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = CMSG_SPACE(count * sizeof(int));
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(count * sizeof(int));
    memcpy(CMSG_DATA(header), fds, count * sizeof(int));
    if (sendmsg(socket, &message, MSG_NOSIGNAL) != sizeof rank)
        throw os_error("sending descriptors to a peer");
}

// Returns the sender's rank, or -1 when this was no peer of ours.
int receive_descriptors(int socket, int* fds, int count) {
    int rank = -1;
    char control[CMSG_SPACE(2 * sizeof(int))] = {};
    iovec data{&rank, sizeof rank};
    msghdr message{};
    message.msg_iov = &data;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = sizeof control;
    const ssize_t bytes = recvmsg(socket, &message, MSG_CMSG_CLOEXEC);
    const cmsghdr* header = CMSG_FIRSTHDR(&message);
    const bool some = bytes > 0 && header != nullptr && header->cmsg_type == SCM_RIGHTS;
    const int received =
        some ? static_cast<int>((header->cmsg_len - CMSG_LEN(0)) / sizeof(int)) : 0;
    int all[2] = {-1, -1};
    if (some) memcpy(all, CMSG_DATA(header), received * sizeof(int));
    if (bytes == sizeof rank && received == count) {
        memcpy(fds, all, count * sizeof(int));
        return rank;
    }
    for (int i = 0; i < received; ++i) close(all[i]);
    if (message.msg_flags & MSG_CTRUNC)
        throw std::runtime_error("receiving a peer's descriptors: Too many open files");
    return -1;
}

bool same_user(int socket) {
    ucred peer{};
    socklen_t size = sizeof peer;
    return getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &size) == 0 && peer.uid == geteuid();
}

// Until something has happened on one of the descriptors.
void wait_any(std::vector<pollfd>& fds, std::chrono::steady_clock::time_point deadline,
              int missing) {
    while (true) {
        const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(
                              deadline - std::chrono::steady_clock::now())
                              .count();
        if (left <= 0)
            throw std::runtime_error("rendezvous: " + std::to_string(missing) +
                                     " peers did not connect in time");
        const int ready = poll(fds.data(), fds.size(), static_cast<int>(min64(left, kInterruptMs)));
        if (ready > 0) return;
        if (ready < 0 && errno != EINTR) throw os_error("poll");
        if (interrupt_requested && interrupt_requested())
            throw Error(ErrorKind::interrupted, "rendezvous: interrupted while waiting for peers");
    }
}

bool readable(int fd) {
    pollfd p{fd, POLLIN, 0};
    return poll(&p, 1, 0) > 0;
}

}  // namespace

std::string host_identity() {
    std::string boot;
    std::ifstream file("/proc/sys/kernel/random/boot_id");
    if (!file && errno != ENOENT) throw os_error("reading the boot id");
    file >> boot;
    char netns[64] = {};
    if (readlink("/proc/self/ns/net", netns, sizeof netns - 1) < 0) netns[0] = '\0';
    return boot + " " + netns;
}

Rendezvous::Rendezvous(int64_t heap_bytes)
    : address_(random_name()),
      bytes_(kHeapOffset + heap_bytes),
      segment_(Segment::create(kHeapOffset + heap_bytes)) {
    listener_ = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    if (listener_ < 0) throw os_error("socket");
    sockaddr_un address;
    const socklen_t size = socket_address(address_, &address);
    if (bind(listener_, reinterpret_cast<sockaddr*>(&address), size) != 0 ||
        listen(listener_, kMaxRanks) != 0) {
        const std::system_error error = os_error("listening for peers");
        close(listener_);
        throw error;
    }
#if defined(SYS_pidfd_open)
    pidfd_ = static_cast<int>(syscall(SYS_pidfd_open, getpid(), 0));
#endif
}

Rendezvous::~Rendezvous() {
    if (listener_ >= 0) close(listener_);
    if (pidfd_ >= 0) close(pidfd_);
}

Rendezvous::Result Rendezvous::connect(int rank, const std::vector<std::string>& addresses,
                                       bool use_pidfds, double timeout_seconds) {
    const int world = static_cast<int>(addresses.size());
    const int count = use_pidfds ? 2 : 1;
    const auto deadline = std::chrono::steady_clock::now() +
                          std::chrono::milliseconds(static_cast<int64_t>(timeout_seconds * 1000));
    Result result;
    result.segments.resize(world);
    std::vector<std::unique_ptr<FileDescriptor>> outgoing(world);
    const int mine[2] = {segment_->fd(), pidfd_};
    for (int peer = 0; peer < world; ++peer) {
        if (peer == rank) continue;
        const int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
        outgoing[peer] = std::make_unique<FileDescriptor>(fd);
        sockaddr_un address;
        const socklen_t size = socket_address(addresses[peer], &address);
        if (fd < 0 || ::connect(fd, reinterpret_cast<sockaddr*>(&address), size) != 0)
            throw os_error(("connecting to rank " + std::to_string(peer)).c_str());
        send_descriptors(fd, rank, mine, count);
    }
    std::vector<std::unique_ptr<FileDescriptor>> pidfds(world);
    for (int missing = world - 1; missing > 0;) {
        std::vector<pollfd> watched{{listener_, POLLIN, 0}};
        std::vector<int> ranks{rank};
        for (int peer = 0; peer < world; ++peer) {
            if (peer == rank || result.segments[peer]) continue;
            watched.push_back({outgoing[peer]->fd, 0, 0});  // tells when the peer hangs up
            ranks.push_back(peer);
        }
        wait_any(watched, deadline, missing);
        // A peer connects before it accepts: if it hangs up although it has not connected, it is
        // gone.
        for (size_t i = 1; i < watched.size(); ++i)
            if (watched[i].revents != 0 && !readable(listener_))
                throw std::runtime_error("rendezvous: rank " + std::to_string(ranks[i]) +
                                         " has died or given up");
        if (!readable(listener_)) continue;
        const FileDescriptor incoming(accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC));
        if (incoming.fd < 0 && errno != EINTR && errno != ECONNABORTED)
            throw os_error("accepting a peer");
        if (incoming.fd < 0 || !same_user(incoming.fd)) continue;
        std::vector<pollfd> first{{incoming.fd, POLLIN, 0}};
        wait_any(first, deadline, missing);
        int fds[2] = {-1, -1};
        const int peer = receive_descriptors(incoming.fd, fds, count);
        if (peer < 0) continue;
        FileDescriptor memory(fds[0]);
        auto process = std::make_unique<FileDescriptor>(fds[1]);
        if (peer >= world || peer == rank || result.segments[peer]) continue;
        result.segments[peer].reset(Segment::map(memory.release(), bytes_));
        pidfds[peer] = std::move(process);
        --missing;
    }
    result.segments[rank] = std::move(segment_);
    if (use_pidfds)
        for (auto& fd : pidfds) result.pidfds.push_back(fd ? fd->release() : -1);
    return result;
}

}  // namespace coconet
