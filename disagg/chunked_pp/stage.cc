#include "disagg/chunked_pp/stage.h"

#include <sys/prctl.h>

#include <chrono>
#include <cstring>
#include <utility>

#include "allocator/kv/kv_shards.h"
#include "base/log.h"
#include "disagg/transport/shared_memory.h"

namespace xpyd::disagg::ranks {
using Seconds = std::chrono::duration<double>;

// The state of one run of serve(): the head's Start, and what the stage made for it. The activations' transport numbers
// its peers by stage, and the head is peer pp.
struct Stage::Parts {
  struct Observer final : LayerObserver {
    ChannelPtr channel;
    uint32_t wave = 0;
    void layer_done(int layer) override { say_to(channel, Progress{wave, uint32_t(layer) + 1}); }
  };
  ChannelPtr channel;
  Start start;
  KvShards shards;
  std::vector<KvLayout> layouts;                  // [tp]
  std::vector<std::shared_ptr<std::byte>> pools;  // [tp]
  std::unique_ptr<StageRanks> ranks;
  std::unique_ptr<ThreadTeam> team;  // [tp]
  std::vector<float> logits;         // [kSlots, max_logits, vocab], of the last stage
  std::optional<BoundaryIn> in;
  std::unique_ptr<KvTransport> transport;
  std::optional<BoundaryOut> out;
  std::optional<KvPoster> poster;  // set if the head is on another host; only the channel's I/O thread calls it
  std::vector<MemoryRange> kv() const {
    std::vector<MemoryRange> ranges;
    for (size_t r = 0; r < pools.size(); ++r) ranges.push_back({pools[r].get(), layouts[r].pool_bytes()});
    return ranges;
  }
  Observer observer;
  bool last = false;
};

void Stage::stop() {
  std::lock_guard lock(mutex_);
  stopped_ = true;
  changed_.notify_all();
}

bool Stage::over() {
  std::lock_guard lock(mutex_);
  return stopped_ || closed_;
}

Status Stage::run() {
  prctl(PR_SET_TIMERSLACK, 1000ul);  // ns; the default of 50 us is as long as the longest nap
  double alone_since = clock_.now();
  for (;;) {
    const Status served = serve();
    std::unique_lock lock(mutex_);
    if (stopped_) return ok();
    if (!served && served.error().code == ErrorCode::invalid_argument) return served;
    if (std::exchange(served_, false)) alone_since = clock_.now();
    if (options_.give_up_s > 0 && clock_.now() > alone_since + options_.give_up_s)
      return served ? Error{ErrorCode::unavailable, "the instance that this stage belongs to is gone"} : served.error();
    changed_.wait_for(lock, Seconds(options_.retry_s), [&] { return stopped_; });
    if (stopped_) return ok();
  }
}

// Returns the next message. Throws the Error that ends serve() if the channel has closed or stop() was called. While
// is_busy() returns true, it is called again every 20 ms.
Stage::Frame Stage::next(std::function<bool()> is_busy) {
  for (;;) {
    const bool busy = is_busy && is_busy();
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, Seconds(busy ? 0.02 : 3600), [&] { return stopped_ || closed_ || !inbox_.empty(); });
    if (stopped_ || closed_) throw Error{ErrorCode::unavailable, closed_.value_or("the worker was stopped")};
    if (!inbox_.empty()) {
      Frame frame = std::move(inbox_.front());
      inbox_.pop_front();
      return frame;
    }
  }
}

template <class T>
T Stage::expect() {
  const Frame frame = next();
  if (frame.type != kType<T>)
    throw invalid("unexpected message of kind " + std::to_string(frame.type) + " before the set-up was complete");
  return need(from_bytes<T>(frame.bytes));
}

template <class Done>
void Stage::wait_until(Done done) {
  for (Naps naps; !done(); naps.nap())
    if (over()) throw Error{ErrorCode::unavailable, "the channel to the instance closed"};
}

Status Stage::serve() {
  {
    std::lock_guard lock(mutex_);
    inbox_.clear();
    closed_.reset();
  }
  poster_ = nullptr;
  Parts p;
  const auto log = [](const std::string& text) { log_line(LogLevel::warning, "xpyd worker: %s", text.c_str()); };
  ControlLoop loop(clock_, {.silence_timeout_s = options_.silence_s}, log, [this] {
    KvPoster* poster = poster_;
    return poster && poster->go_on();
  });
  const auto on_open = [this](const ChannelPtr& channel) -> ChannelEvents {
    return {[this, channel](uint16_t type, std::string_view bytes) {
              KvPoster* poster = poster_;
              if (poster && type >= kType<ConnectPeer> && type <= kType<Cancel>) {
                if (Status taken = poster->take(type, bytes); !taken)
                  channel->close("message refused: " + taken.error().message);
                return;
              }
              std::lock_guard lock(mutex_);
              inbox_.push_back({type, std::string(bytes)});
              changed_.notify_all();
            },
            [this](const std::string& why) {
              std::lock_guard lock(mutex_);
              closed_ = why;
              changed_.notify_all();
            }};
  };
  const NodeIdentity self{"stage" + std::to_string(options_.stage), options_.fingerprint};
  const std::string head = options_.find_head ? options_.find_head() : options_.join;
  if (head.empty()) return Error{ErrorCode::unavailable, "the registry has no instance with this --rank-group"};
  Result<ChannelPtr> channel = loop.connect({head, options_.key, self}, 5, on_open);
  // A wrong address on the command line stays wrong. The registry may have another one later.
  if (!channel)
    return Error{options_.find_head ? ErrorCode::unavailable : channel.error().code, channel.error().message};
  p.channel = channel.value();
  const auto end = [&](const Error& error) -> Status {
    if (!over()) {
      log("stage " + std::to_string(options_.stage) + ": " + error.message);
      p.channel->close(error.message);
    }
    return error;
  };
  try {
    set_up(p);
    for (;;) {
      const Frame frame = next([&p] {
        bool busy = false;
        for (int slot = 0; slot < kSlots; ++slot) busy |= !need(p.out->left(slot));
        return busy;
      });
      if (frame.type == kType<Copies>)
        copy(p, need(from_bytes<Copies>(frame.bytes)));
      else if (frame.type == kType<Wave>)
        compute(p, need(from_bytes<Wave>(frame.bytes)));
      else
        throw invalid("unexpected message of kind " + std::to_string(frame.type));
    }
  } catch (const Error& error) {
    return end(error);
  } catch (const std::bad_alloc&) {
    return end({ErrorCode::unavailable, "the process is out of memory"});
  }
}

void Stage::set_up(Parts& p) {
  const Start& start = p.start = expect<Start>();
  const ModelConfig& c = options_.config;
  const int stage = options_.stage;
  p.shards = {.n_layers = c.n_layers, .n_kv_heads = c.n_kv_heads, .tp = start.tp, .pp = start.pp};
  need(check_model_shards(c, p.shards));
  if (stage >= start.pp)
    throw invalid("--rank " + std::to_string(stage) + ": the instance has " + std::to_string(start.pp) + " stages");
  if (int64_t(start.block_tokens) * start.n_blocks > kMaxKvTokens)
    throw invalid("the instance's KV has too many tokens");
  if (start.dtype != uint8_t(options_.dtype))
    throw invalid("--dtype or --weight-dtype differs from that of the instance");
  p.last = stage + 1 == start.pp;
  p.ranks = need(options_.make_ranks(p.shards, stage, start.step_tokens));
  p.team = std::make_unique<ThreadTeam>(start.tp);
  std::vector<std::string> files;
  for (int rank = stage * start.tp; rank < (stage + 1) * start.tp; ++rank) {
    const KvShape whole = kv_shape(c, Dtype(start.kv_dtype));
    p.layouts.push_back(
        {rank_shape(whole, p.shards, rank), KvOrder(start.kv_order), start.block_tokens, start.n_blocks});
    p.pools.push_back(need(shared_pool_memory(p.layouts.back().pool_bytes())));
    if (!start.far) files.push_back(need(shared_file({p.pools.back().get(), p.layouts.back().pool_bytes()})).name);
  }
  const TransportRow* transport = find_transport(start.transport);
  if (!transport) throw invalid("there is no transport named " + start.transport);
  const size_t width = size_t(c.hidden), most_logits = size_t(start.max_logits) * size_t(c.vocab);
  p.in = need(
      BoundaryIn::make(*transport, stage > 0 ? start.places : 1, stage > 0 ? size_t(start.step_tokens) * width : 0));
  const TransportOptions transport_options{.regions = {p.in->region()},
                                           .queue = &cpu_queue(),
                                           .clock = &clock_,
                                           .self = stage,
                                           .host = options_.transport_host,
                                           .connections = 1};
  p.transport = need(transport->make(transport_options));
  if (p.last) p.logits.resize(kSlots * most_logits);
  say_to(p.channel, Ready{p.transport->address(), files});

  const Peers peers = expect<Peers>();
  if (stage > 0) wait_until([&] { return need(p.transport->connect(stage - 1, peers.previous)); });
  wait_until([&] { return need(p.transport->connect(stage + 1, peers.next)); });
  p.out.emplace(*p.transport, clock_, stage + 1, p.last ? most_logits : size_t(start.step_tokens) * width);
  Connected connected;
  if (stage > 0) connected.registrations = need(p.in->open(*p.transport, stage - 1));
  if (start.far) {
    const TransportOptions kv_transport{.regions = p.kv(),
                                        .queue = &cpu_queue(),
                                        .clock = &clock_,
                                        .self = start.instance,
                                        .host = options_.transport_host};
    poster_ = &p.poster.emplace(need(transport->make(kv_transport)), p.kv(), p.channel);
  }
  say_to(p.channel, connected);
  p.observer.channel = p.channel;
  log_line(LogLevel::info, "xpyd worker: stage %d of %d serves", stage, start.pp);
  std::lock_guard lock(mutex_);
  served_ = true;
}

void Stage::copy(const Parts& p, const Copies& copies) {
  const std::vector<MemoryRange> kv = p.kv();
  for (const KvBytes& piece : copies.pieces)
    std::memmove(kv[piece.rank].data() + piece.to, kv[piece.rank].data() + piece.at, size_t(piece.bytes));
}

void Stage::compute(Parts& p, const Wave& wave) {
  const int place = int(wave.number % uint32_t(p.start.places)), slot = int(wave.number % kSlots);
  const size_t hidden = size_t(options_.config.hidden), n_seqs = wave.kv_lengths.size();
  std::vector<KvView> views;  // [tp, n_seqs]
  for (size_t r = 0; r < p.layouts.size(); ++r) {
    const int32_t* blocks = wave.blocks.data();
    for (int32_t length : wave.kv_lengths) {
      views.push_back(
          {p.pools[r].get(), &p.layouts[r], wave.contiguous ? nullptr : blocks, wave.contiguous ? *blocks : 0});
      blocks += wave.contiguous ? 1 : (length + p.start.block_tokens - 1) / p.start.block_tokens;
    }
  }
  const float* x_in = nullptr;
  Progress done{wave.number, uint32_t(p.shards.layers(options_.stage).end), true};
  if (options_.stage > 0) {
    wait_until([&] { return p.in->arrived(*p.transport, place); });
    x_in = p.in->take(place);
  }
  wait_until([&] { return need(p.out->left(slot)); });
  const double began = clock_.now();
  const StepInput step{.token_ids = wave.token_ids,
                       .q_offsets = wave.q_offsets,
                       .kv_lengths = wave.kv_lengths,
                       .views = {},
                       .logit_rows = wave.logit_rows};
  p.observer.wave = wave.number;
  float* logits = p.logits.data() + size_t(slot) * p.logits.size() / kSlots;
  p.team->run([&](int r) {
    StepInput mine = step;
    mine.views = std::span(views).subspan(size_t(r) * n_seqs, n_seqs);
    if (wave.by_layer && r == 0) mine.observer = &p.observer;
    p.ranks->rank(r).run(mine, x_in, p.ranks->rank(r).x(slot), wave.by_layer, logits);
  });
  done.seconds = clock_.now() - began;
  p.ranks->add_load(done.experts);
  if (!p.last) {
    p.out->post(slot, p.ranks->rank(0).x(slot), wave.token_ids.size() * hidden, place, wave.result);
  } else if (!wave.logit_rows.empty()) {
    p.out->post(slot, logits, wave.logit_rows.size() * size_t(options_.config.vocab), place, wave.result);
    wait_until([&] { return need(p.out->left(slot)); });
  }
  say_to(p.channel, done);
}

}  // namespace xpyd::disagg::ranks
