// rdma: one-sided verbs (libibverbs, reliable connections) between instances of any process or
// host. The parts: rdma_verbs (devices, queue pairs), rdma_messages and side_channel (what the
// sides tell each other over TCP), rdma_plan (ranges, requests, batches: arithmetic that needs no
// device), rdma_serving (windows), rdma_posting (transfers).
#include <sys/random.h>

#include "disagg/transport/rdma_posting.h"
#include "disagg/transport/rdma_serving.h"
#include "disagg/transport/side_channel.h"
#include "disagg/transport/wires.h"

namespace xpyd {
namespace {

class RdmaTransport final : public KvTransport {
 public:
  RdmaTransport(const TransportOptions& options, std::vector<rdma::Rail> rails)
      : self_(options.self),
        clock_(*options.clock),
        connect_s_(options.connect_s),
        rails_(std::move(rails)),
        serving_(rails_, options.regions),
        posting_(rails_, options.regions, *options.clock, rails_[0].device_memory ? options.queue : nullptr),
        channels_(rdma::kSideLimits, [this](const std::shared_ptr<SideChannel>& channel) { accepted(channel); }) {
    XPYD_CHECK(getrandom(&address_.token, sizeof address_.token, 0) == ssize_t(sizeof address_.token));
    address_.host = options.host;
    for (const MemoryRange& region : options.regions)
      address_.regions.push_back({reinterpret_cast<uint64_t>(region.data()), region.size()});
  }
  // No peer may be answered by what is half gone.
  ~RdmaTransport() override { channels_.stop(); }

  Status start() {
    if (auto listening = channels_.listen(address_.host); !listening)
      return Error{listening.error().code, "rdma: " + listening.error().message};
    address_.host = channels_.host();
    address_.port = channels_.port();
    channels_.start();
    return ok();
  }

  std::string address() const override { return rdma::to_text(address_); }
  Result<bool> connect(PeerId peer, const std::string& text) override {
    auto address = rdma::parse_address(text);
    if (!address) return address.error();
    const double until = clock_.now() + connect_s_;
    const Result<bool> connected = posting_.connect(self_, peer, address.value(), until, channels_);
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
    stats.refused = serving_.refused();
    return stats;
  }

 private:
  // On the channels' thread.
  void accepted(const std::shared_ptr<SideChannel>& channel) {
    SideChannel* c = channel.get();  // which holds this function
    auto peer = std::make_shared<PeerId>(-1);
    auto n_rails = std::make_shared<size_t>(0);
    channel->frame = [this, c, peer, n_rails, weak = std::weak_ptr(channel)](std::string_view body) {
      if (c->trusted) {
        auto message = rdma::parse_message(body, *n_rails);
        return message && serving_.take(*peer, *message);
      }
      auto hello = rdma::parse_hello(body);
      if (!hello || hello->token != address_.token || hello->from < 0 || hello->rails.empty()) return false;
      c->trusted = true;
      *peer = hello->from;
      *n_rails = serving_.join(weak.lock(), *hello);
      return *n_rails > 0;
    };
    channel->left = [this, c, peer] {
      if (*peer >= 0) serving_.left(*peer, c);
    };
  }

  const PeerId self_;
  Clock& clock_;
  const double connect_s_;
  std::vector<rdma::Rail> rails_;
  rdma::Address address_;
  mutable rdma::Serving serving_;
  rdma::Posting posting_;
  SideChannels channels_;
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
  if (auto started = made->start(); !started) return started.error();
  return std::unique_ptr<KvTransport>(std::move(made));
}

}  // namespace xpyd
