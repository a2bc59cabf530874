// The owner's half of the nccl wire: one peer that has called us, and the communicator that it has
// made first of all, in which we are rank 1. A group that it asks for enters its window when we accept it, and
// leaves when the peer drops it or our half has run, or has been broken off. So a window is closed
// when close() says so, and quarantined while one of its groups is accepted: then until the peer
// goes on, or is gone (its channel ends, or disconnect()).
//
// Thread safety: the meeting's thread.
#pragma once

#include <deque>
#include <functional>
#include <map>
#include <memory>

#include "disagg/transport/nccl_messages.h"
#include "disagg/transport/nccl_pipe.h"
#include "disagg/transport/window_table.h"

namespace xpyd::nccl {

class Guest {
 public:
  using MakePipe = std::function<std::unique_ptr<Pipe>(const NcclUniqueId& id, int rank)>;
  Guest(PeerId peer, MakePipe make_pipe, WindowTable& windows, ChannelPtr channel)
      : peer_(peer), make_pipe_(std::move(make_pipe)), windows_(windows), channel_(std::move(channel)) {}
  ~Guest();

  PeerId peer() const { return peer_; }
  bool take(std::string_view body);  // false: the peer talks nonsense
  // The channel has ended, or the peer was disconnected.
  void end(const std::string& why = "it was disconnected");
  bool turn();  // true: again soon
  bool gone() const { return ended_ && pipes_.empty(); }

 private:
  struct Held {  // an accepted group
    Ask ask;
    bool going = false;
  };
  bool accept(uint64_t seq, const Ask& ask);
  void go(uint64_t seq, const Ask& ask);
  void ended(uint64_t seq, bool whole);
  void say(Message::Kind kind, uint64_t seq);

  const PeerId peer_;
  const MakePipe make_pipe_;
  WindowTable& windows_;
  const ChannelPtr channel_;
  std::deque<std::unique_ptr<Pipe>> pipes_;  // the last one is in use, the others run out
  std::map<uint64_t, Held> held_;
  uint64_t last_seq_ = 0;
  // Of the post whose groups run now: they come in their order.
  uint64_t post_ = 0;
  uint32_t placed_ = 0;
  bool ended_ = false;
};

}  // namespace xpyd::nccl
