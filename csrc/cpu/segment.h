// A rank's shared memory: a sealed memfd, mapped. It has no name, so nothing is left after a crash.
#pragma once

#include <cstdint>

namespace coconet {

class Segment {
  public:
    // A new zeroed segment; pages are taken when touched. Throws std::system_error.
    static Segment* create(int64_t bytes);
    // Maps a peer's segment and takes over the descriptor.
    static Segment* map(int fd, int64_t bytes);
    ~Segment();
    Segment(const Segment&) = delete;
    Segment& operator=(const Segment&) = delete;

    char* data() const { return data_; }
    int64_t bytes() const { return bytes_; }
    int fd() const { return fd_; }
    // Whether it was created of huge pages from the system's pool.
    bool huge_pages() const { return huge_; }
    // Bytes of memory that the segment occupies now.
    int64_t resident_bytes() const;
    // Takes the pages of a range; false when the memory isn't there.
    bool touch(int64_t offset, int64_t bytes);

  private:
    Segment(int fd, char* data, int64_t bytes, bool huge)
        : fd_(fd), data_(data), bytes_(bytes), huge_(huge) {}
    int fd_;
    char* data_;
    int64_t bytes_;
    bool huge_;
};

}  // namespace coconet
