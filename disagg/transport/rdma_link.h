// Queue pairs of a link: reliable connections, rail i of one side to rail i of the other, as many
// as the side with fewer has. A link carries the posts of one side into the memory of the other;
// the end that serves has remote rights only through windows, the end that posts has none at all.
//
// Thread safety: functions on one link's queues by one thread at a time.
#pragma once

#include <vector>

#include "disagg/transport/rdma_messages.h"
#include "disagg/transport/rdma_verbs.h"

namespace xpyd::rdma {

struct Queue {
  QueuePair pair;
  RailEnd end;  // ours, as the peer is told of it
  int inline_bytes = 0;
};

enum class Role { post, serve };

// The first `n_rails`, not connected yet. Error `unavailable`: a device has no more of them.
Result<std::vector<Queue>> make_queues(std::vector<Rail>& rails, size_t n_rails, Role role);
// After it the other side's requests are answered, and ours can be posted.
Status connect_queues(std::vector<Rail>& rails, std::vector<Queue>& queues, const std::vector<RailEnd>& theirs);

std::vector<RailEnd> ends_of(const std::vector<Queue>& queues);

}  // namespace xpyd::rdma
