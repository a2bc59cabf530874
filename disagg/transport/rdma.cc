// rdma: one-sided verbs (libibverbs, reliable connections) between instances of any process or host. The parts:
// rdma_verbs (devices, queue pairs), rdma_messages and meeting (what the sides tell each other over TCP), rdma_plan
// (ranges, requests, batches: arithmetic that needs no device), rdma_serving (windows), rdma_posting (transfers).
#include "disagg/transport/rdma_posting.h"
#include "disagg/transport/rdma_serving.h"
#include "disagg/transport/wires.h"

namespace xpyd::disagg {
namespace {

class RdmaTransport final : public KvTransport {
 public:
  RdmaTransport(const TransportOptions& options, std::vector<rdma::Rail> rails)
      : rails_(std::move(rails)),
        serving_(rails_, options.regions),
        meeting_("rdma", options.self, schema_of<rdma::Message>() ^ schema_of<rdma::Offer>(),
                 wire_limits(rdma::kMaxMessageBytes)),
        posting_(rails_, options, rails_[0].device_memory ? options.queue : nullptr, meeting_) {}
  // No peer may be answered by what is half gone.
  ~RdmaTransport() override { meeting_.end(); }

  Status start(const TransportOptions& options) {
    return meeting_.listen(options, [this](const ChannelPtr& channel, PeerId peer) { return accepted(channel, peer); });
  }

  std::string address() const override { return meeting_.address(); }
  Result<bool> connect(PeerId peer, const std::string& text) override {
    const Result<bool> connected = posting_.connect(peer, text);
    if (connected && connected.value()) serving_.connect(peer);
    return connected;
  }
  void disconnect(PeerId peer) override {
    posting_.disconnect(peer);
    serving_.disconnect(peer);
  }
  std::byte* remote(PeerId peer, int region) const override { return posting_.remote(peer, region); }

  Result<WindowKey> open(PeerId peer, KvOp op, std::span<const MemoryRange> ranges) override {
    return serving_.open(peer, op, ranges);
  }
  bool close(const WindowKey& window) override { return serving_.close(window); }
  int arrived(const WindowKey& window) const override { return serving_.arrived(window); }

  TransferId post(const KvTransfer& transfer, const TransferPlan& plan) override {
    return posting_.post(transfer, plan);
  }
  TransferState poll(TransferId id) override { return posting_.poll(id); }
  void cancel(TransferId id) override { posting_.cancel(id); }
  TransportStats stats() const override {
    TransportStats stats = posting_.stats();
    stats.refused = serving_.refused() + meeting_.refused();
    return stats;
  }

 private:
  // On the meeting's thread.
  ChannelEvents accepted(const ChannelPtr& channel, PeerId peer) {
    return hear(
        channel,
        [this, channel, peer, n_rails = size_t(0)](std::string_view bytes) mutable {
          if (n_rails > 0) {
            const auto message = rdma::read_message(bytes, n_rails);
            return message && serving_.take(peer, message.value());
          }
          const auto offer = from_bytes<rdma::Offer>(bytes);
          if (offer && !offer.value().rails.empty()) n_rails = serving_.join(peer, channel, offer.value());
          return n_rails > 0;
        },
        [this, channel, peer] { serving_.left(peer, channel.get()); });
  }

  std::vector<rdma::Rail> rails_;
  mutable rdma::Serving serving_;
  Meeting meeting_;
  rdma::Posting posting_;
};

}  // namespace

MadeTransport make_rdma_transport(const TransportOptions& options) {
  return make_rdma_transport(options, rdma::Keys::automatic);
}

MadeTransport make_rdma_transport(const TransportOptions& options, rdma::Keys keys) {
  XPYD_CHECK(options.clock != nullptr);
  auto rails = rdma::open_rails(options, keys);
  if (!rails) return rails.error();
  auto made = std::make_unique<RdmaTransport>(options, std::move(rails.value()));
  if (auto started = made->start(options); !started) return started.error();
  return std::unique_ptr<KvTransport>(std::move(made));
}

}  // namespace xpyd::disagg
