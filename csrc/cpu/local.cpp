#include "cpu/local.h"

#include <string>

namespace coconet {

std::vector<std::shared_ptr<Communicator>> local_communicators(int world,
                                                               CommunicatorOptions options) {
    if (world < 1 || world > kMaxRanks)
        throw Error(ErrorKind::communicator,
                    "Communicator: the world size is " + std::to_string(world) +
                        "; it must be between 1 and " + std::to_string(kMaxRanks));
    Rendezvous::Result shared;
    for (int r = 0; r < world; ++r)
        shared.segments.emplace_back(Segment::create(kHeapOffset + options.heap_bytes));
    shared.pidfds.assign(world, -1);
    std::vector<std::shared_ptr<Communicator>> ranks;
    for (options.rank = 0; options.rank < world; ++options.rank)
        ranks.push_back(std::make_shared<Communicator>(options, shared));
    return ranks;
}

}  // namespace coconet
