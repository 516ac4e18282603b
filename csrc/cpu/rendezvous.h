// How ranks on one host map each other's segments: each listens on an abstract unix socket and
// sends every peer the descriptor of its memfd, and its own pidfd.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "cpu/segment.h"

namespace coconet {

class Rendezvous {
  public:
    explicit Rendezvous(int64_t heap_bytes);
    ~Rendezvous();

    // Exchanged between ranks by the layer above.
    const std::string& address() const { return address_; }
    bool has_pidfd() const { return pidfd_ >= 0; }

    struct Result {
        std::vector<std::shared_ptr<Segment>> segments;  // by rank, the own one included
        std::vector<int> pidfds;                         // by rank; empty when not used
    };
    // addresses: by rank. use_pidfds: every rank has one. Throws std::runtime_error or
    // std::system_error.
    Result connect(int rank, const std::vector<std::string>& addresses, bool use_pidfds,
                   double timeout_seconds);

  private:
    std::string address_;
    int64_t bytes_;
    std::unique_ptr<Segment> segment_;
    int listener_ = -1;
    int pidfd_ = -1;
};

// Two processes can share memory exactly when they share this (boot and network namespace: an
// abstract socket crosses neither).
std::string host_identity();

}  // namespace coconet
