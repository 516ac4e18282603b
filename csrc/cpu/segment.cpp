#include "cpu/segment.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <system_error>

#include "common/layout.h"
#include "cpu/system.h"

#ifndef MFD_HUGE_2MB
#define MFD_HUGE_2MB (21u << 26)
#endif
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace coconet {

namespace {

// A memfd of this size, sealed so that a peer can't make this rank's accesses fault by shrinking
// it; -1 and errno.
int sealed_memfd(int64_t bytes, unsigned flags) {
    const int fd = memfd_create("coconet", MFD_CLOEXEC | MFD_ALLOW_SEALING | flags);
    if (fd < 0) return -1;
    if (ftruncate(fd, bytes) == 0 && fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) == 0)
        return fd;
    const int cause = errno;
    close(fd);
    errno = cause;
    return -1;
}

void* map_shared(int fd, int64_t bytes, int flags) {
    return mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | flags, fd, 0);
}

}  // namespace

Segment* Segment::create(int64_t bytes) {
    // The system's pool of huge pages, where it has enough for all of the segment: without
    // MAP_NORESERVE they are set aside now, or the mapping fails.
    if (bytes % kHugePage == 0) {
        const int fd = sealed_memfd(bytes, MFD_HUGETLB | MFD_HUGE_2MB);
        void* data = fd < 0 ? MAP_FAILED : map_shared(fd, bytes, 0);
        if (data != MAP_FAILED) return new Segment(fd, static_cast<char*>(data), bytes, true);
        if (fd >= 0) close(fd);
    }
    const int fd = sealed_memfd(bytes, 0);
    if (fd < 0) throw os_error("creating a shared segment");
    return map(fd, bytes);
}

Segment* Segment::map(int fd, int64_t bytes) {
    void* data = map_shared(fd, bytes, MAP_NORESERVE);
    if (data == MAP_FAILED) {
        const std::system_error error = os_error("mapping a shared segment");
        close(fd);
        throw error;
    }
    // Hints: transparent huge pages where the system allows them, no heap in core dumps.
    madvise(data, bytes, MADV_HUGEPAGE);
    madvise(data, bytes, MADV_DONTDUMP);
    return new Segment(fd, static_cast<char*>(data), bytes, false);
}

Segment::~Segment() {
    munmap(data_, bytes_);
    close(fd_);
}

int64_t Segment::resident_bytes() const {
    struct stat s;
    return fstat(fd_, &s) == 0 ? static_cast<int64_t>(s.st_blocks) * 512 : -1;
}

bool Segment::touch(int64_t offset, int64_t bytes) {
    const int64_t begin = offset / kPage * kPage;
    const int64_t end = round_up(offset + bytes, kPage);
    int result;
    do result = madvise(data_ + begin, end - begin, MADV_POPULATE_WRITE);
    while (result != 0 && errno == EINTR);
    if (result == 0) return true;
    if (errno != EINVAL) return false;
    // Kernels before 5.14 don't know the request. Reserve the blocks instead.
    return fallocate(fd_, 0, begin, end - begin) == 0;
}

}  // namespace coconet
