// Errors of the communicator, as the binding layer turns them into Python's.
#pragma once

#include <stdexcept>
#include <string>

namespace coconet {

enum class ErrorKind { communicator, peer_lost, timeout, mismatch, heap_exhausted, interrupted };

class Error : public std::runtime_error {
  public:
    Error(ErrorKind kind, const std::string& text) : std::runtime_error(text), kind(kind) {}
    ErrorKind kind;
};

}  // namespace coconet
