#include "disagg/transport/nccl/nccl_pipe.h"

#include "base/clock.h"

namespace xpyd::disagg::nccl {

Pipe::Pipe(const NcclApi& api, std::unique_ptr<DeviceQueue> queue, const NcclUniqueId& id, int rank)
    : api_(api), queue_(std::move(queue)), peer_(1 - rank), made_s_(RealClock().now()) {
  XPYD_CHECK(dynamic_cast<VendorQueue*>(queue_.get()) != nullptr);
  NcclConfig config;
  check(api_.comm_init_rank_config(&comm_, 2, id, rank, &config));
}

Pipe::~Pipe() {
  if (comm_) abort_comm(api_, comm_);
  queue_->wait();
}

void Pipe::enqueue(uint64_t seq, bool send, std::vector<MemoryRange> parts) {
  groups_.push_back({seq, send, std::move(parts), 0});
}

// ncclCommAbort is local. ncclCommDestroy waits for the peer in some versions. After the abort no kernel of this
// communicator waits for anything, so the stream runs empty.
void Pipe::abort(const std::string& why) {
  if (state_ == State::broken) return;
  state_ = State::broken;
  why_ = why;
  if (comm_) abort_comm(api_, std::exchange(comm_, nullptr));
  end_mark_ = queue_->mark();
  drained_ = false;
}

bool Pipe::overdue() const { return state_ == State::joining && RealClock().now() > made_s_ + kJoinSeconds; }

bool Pipe::check(int result) {
  if (result == kNcclSuccess || result == kNcclInProgress) return true;
  abort(nccl_error(api_, result, comm_));
  return false;
}

int Pipe::async() {
  int state = kNcclInternalError;
  const int result = api_.comm_get_async_error(comm_, &state);
  return result == kNcclSuccess ? state : result;
}

void Pipe::launch(Group& group) {
  void* stream = dynamic_cast<VendorQueue&>(*queue_).handle();
  if (!check(api_.group_start())) return;
  int first = kNcclSuccess;  // the first error; group_end() must be called even after one
  for (const MemoryRange& part : group.parts) {
    const int result = group.send ? api_.send(part.data(), part.size(), kNcclUint8, peer_, comm_, stream)
                                  : api_.recv(part.data(), part.size(), kNcclUint8, peer_, comm_, stream);
    if (first == kNcclSuccess && result != kNcclInProgress) first = result;
  }
  const int end = api_.group_end();
  if (!check(first) || !check(end)) return;
  launching_ = end == kNcclInProgress;
}

bool Pipe::turn(const std::function<void(uint64_t seq, bool whole)>& ended) {
  if (state_ != State::broken && (state_ == State::joining || launching_ || n_launched_ > 0)) {
    const int now = async();
    if (check(now) && now == kNcclSuccess) {
      state_ = State::ready;
      if (std::exchange(launching_, false)) groups_[n_launched_ - 1].mark = queue_->mark();
    }
  }
  while (state_ == State::ready && !launching_ && n_launched_ < groups_.size()) {
    Group& group = groups_[n_launched_++];
    if (!group.parts.empty()) launch(group);
    if (state_ == State::ready && !launching_) group.mark = queue_->mark();
  }
  while (state_ == State::ready && n_launched_ > (launching_ ? 1 : 0) && queue_->reached(groups_.front().mark) &&
         check(async())) {
    const uint64_t seq = groups_.front().seq;
    groups_.pop_front();
    --n_launched_;
    ended(seq, true);
  }
  if (state_ == State::broken && queue_->reached(end_mark_)) {
    drained_ = true;
    n_launched_ = 0;
    std::deque<Group> broken = std::exchange(groups_, {});
    for (const Group& group : broken) ended(group.seq, false);
  }
  return !empty();
}

}  // namespace xpyd::disagg::nccl
