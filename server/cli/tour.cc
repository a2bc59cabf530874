// xpyd tour: one prompt through disaggregated prefill and decode (DistServe, Splitwise, Mooncake), in one thread and on
// this page. `make tour` runs it. Read tour_main() from its top. Each step is one call of a class that the server runs;
// its comment names the idea and the file.
//
// The page leaves out what serving many requests needs: scheduling across instances (disagg/conductor/conductor.cc),
// failures (disagg/handover/), threads, processes, HTTP.
#include <algorithm>
#include <cstdio>

#include "batch/engine/engine.h"
#include "disagg/handover/transfer_plan.h"
#include "model/folder.h"
#include "model/text/tokenizer.h"
#include "server/cli/commands.h"
#include "server/cli/vattention_tour.h"

namespace xpyd::server {
namespace {

constexpr PeerId kP = 0, kD = 1, kAlone = 2;
constexpr int kStepTokens = 32, kMaxBatch = 4;

// Receives the tokens of one request, as its client's stream does (server/openai/generation.cc).
struct Output final : EventSink {
  void on_event(TokenEvent event) override { text += event.text, logits_hash = event.logits_hash; }
  std::string text;
  uint64_t logits_hash = 0;  // of all logits rows from which a token was sampled
};

// The instances share the demo model inside this binary and a thread to compute with.
struct Shared {
  const ModelConfig config = load_model_config(kDemoModel).value();
  const std::unique_ptr<const Tokenizer> tokenizer = Tokenizer::load(kDemoModel).value();
  ThreadTeam team{1};
  const std::shared_ptr<const Weights> weights = load_weights(kDemoModel, config, {}, team).value();
  RealClock clock;
  // 16 blocks of 16 tokens of 4 KiB.
  const KvOptions kv{.shape = kv_shape(config, Dtype::f32), .pool_bytes = 1 << 20};

  std::shared_ptr<const Request> request(const char* prompt) const {
    auto request = std::make_shared<Request>();
    request->prompt = tokenizer->encode(prompt);  // byte-pair encoding
    request->sampling.temperature = 0;
    return request;
  }
};

// An instance: a KV memory, a transport to its peers, and an engine over a model. The server's instance
// (disagg/instance/instance.cc) adds a mailbox and a loop. The names are rows of tables: "slots" instead of "paged", or
// "tcp" instead of "local", gives the same hash.
struct Side {
  const PeerId id;
  Shared& shared;
  EngineHooks* const hooks = nullptr;
  const std::unique_ptr<KvMemory> memory =  // allocator/paged/paged.cc
      find_kv_scheme("paged")->make(make_block_pool("paged", shared.kv).value(), shared.kv);
  const MemoryRange pool = {memory->base(), memory->layout().pool_bytes()};
  const std::unique_ptr<KvTransport> transport =  // disagg/transport/local.cc
      find_transport("local")->make({{pool}, &cpu_queue(), &shared.clock, id}).value();
  const std::unique_ptr<Model> model =  // model/llama/llama.cc
      make_llama(shared.weights, shared.team, kStepTokens, kMaxBatch);
  const EngineOptions options{.policy = find_batch_policy("chunked"),  // batch/policies/policy.cc
                              .max_batch = kMaxBatch,
                              .step_tokens = kStepTokens,
                              .eos_tokens = shared.config.eos_tokens,
                              .tokenizer = shared.tokenizer.get()};
  Engine engine{*model, *memory, options, shared.clock, hooks};  // batch/engine/engine.cc
};

// P's side of the hand-over, as engine hooks, like disagg/handover/sender.cc.
struct Sender final : EngineHooks {
  bool layerwise() const override { return true; }

  // Called inside the forward pass after each layer: the layer's KV of tokens [begin, end) is sent while the next layer
  // is computed (Splitwise, section 4.2). Tokens in D's prefix cache are not sent.
  void kv_written(Sequence& sequence, int layer, int layer_end, int begin, int end) override {
    // Both sides are a KvView: only allocator/kv/kv_layout.h computes addresses.
    const KvView here = p->memory->view(sequence.kv);
    const KvView there{p->transport->remote(kD, 0), &d->memory->layout(), place.blocks.data()};
    for (int token = std::max(begin, place.cached_tokens), next; token < end; token = next) {
      const int block = token / here.layout->block_tokens;
      next = std::min(end, (block + 1) * here.layout->block_tokens);
      plan_transfer(here, there, {token, next, layer, layer_end}, plan);  // disagg/handover/transfer_plan.h
      posts.push_back(p->transport->post({kD, KvOp::write, place.registration}, plan));
      bytes += plan.bytes;
      std::printf("  tokens %d to %d: block %d of P, layer %d, %zu KiB -> block %d of D\n", token, next,
                  here.block_table[block], layer, plan.bytes >> 10, there.block_table[block]);
    }
  }

  // The first token is sampled, and the sequence leaves as a value, without sampler or text.
  void prefill_done(std::vector<SequencePtr> choices) override {
    state = state_of(*choices[0]);
    kv = choices[0]->kv;
  }

  Side *p = nullptr, *d = nullptr;
  KvPlace place;      // place of the prompt's KV on D: arrives in a message, KvReserved (disagg/messages.h)
  ChoiceState state;  // progress of the sequence: sent in a message, KvDelivered
  TransferPlan plan;
  std::vector<TransferId> posts;
  size_t bytes = 0;     // of these
  KvHandle kv = kNoKv;  // on P
};

}  // namespace

int tour_main(const Options& options) {
  if (options.text("allocator") == "vattention") return vattention_tour();
  Shared shared;
  Sender sender;
  Side p{kP, shared, &sender}, d{kD, shared}, alone{kAlone, shared};
  sender.p = &p, sender.d = &d;
  const auto output = std::make_shared<Output>(), other = std::make_shared<Output>();

  const auto request = shared.request(
      "The key of box 17 is amber. The owner of house 3 is Grace. The drink of table 17 is tea. "
      "The city of train 17 is Oslo. What is the key of box 17?");
  const std::span<const int32_t> prompt = request->prompt;
  const int n = int(prompt.size());
  std::printf("prompt, %d tokens: \"%s\"\n", n, shared.tokenizer->decode(request->prompt).c_str());

  // D is already serving a request.
  const auto others = shared.request("The captain of ship 31 is Hugo. Who is captain of ship 31?");
  d.engine.submit(make_sequence(others, {}, other, nullptr, nullptr));
  d.engine.step();

  // P and D find each other by an address (disagg/transport/transport.h specifies every transport).
  while (!p.transport->connect(kD, d.transport->address()).value()) continue;
  while (!d.transport->connect(kP, p.transport->address()).value()) continue;

  // D grants room for the prompt: blocks of its paged memory (PagedAttention). A lease keeps them, whatever becomes of
  // the sequence, and a registration lets P, and only P, write there.
  const auto [kv, cached, loading] = d.memory->reserve(prompt, 0).value();
  XPYD_CHECK(d.memory->append(kv, n - cached));
  const KvLease lease = d.memory->pin(kv);
  const RemoteKey key = d.transport->open(kP, KvOp::write, rows_of(*d.memory, kv, cached, n)).value();
  sender.place = place_of(*d.memory, kv, key, cached);

  // P computes the prompt, 32 tokens a step (chunked prefill, Sarathi-Serve), and sends it layer by layer: kv_written()
  // above. D's decode steps do not wait for it. That is the purpose of disaggregation.
  SequencePtr leaving = make_sequence(request, {}, output, nullptr, nullptr);
  leaving->leaves = true;
  p.engine.submit(std::move(leaving));
  while (p.engine.step()) d.engine.step();
  std::printf("P has sampled the first token: \"%s\"\n", output->text.c_str());
  for (TransferId id : sender.posts) {  // until it is done, the transport may read P's blocks
    TransferState state;
    while ((state = p.transport->poll(id)) == TransferState::in_flight) continue;
    XPYD_CHECK(state == TransferState::done);
  }
  p.memory->free(sender.kv);

  // D counts what has arrived. Once the registration is closed, no other instance can write there. The KV is then D's
  // own, and the next prompt with the same beginning can find it (prefix caching).
  while (d.transport->arrived(key) < int(sender.posts.size())) continue;
  while (!d.transport->close(key)) continue;
  d.memory->unpin(lease);
  d.memory->commit(kv, prompt.subspan(size_t(cached)));
  const size_t token_bytes = d.memory->layout().shape.token_bytes();
  std::printf("D has received %zu bytes in %zu transfers; %d tokens of %zu bytes are %zu bytes\n",
              sender.bytes, sender.posts.size(), n - cached, token_bytes,
              size_t(n - cached) * token_bytes);

  // The sequence continues on D from the token that P sampled and joins the batch (Orca, continuous batching).
  SequencePtr here = make_sequence(request, sender.state, output, nullptr, shared.tokenizer.get());
  here->kv = kv;
  here->computed = n;
  d.engine.adopt(std::move(here));
  while (d.engine.step())
    std::printf("D decodes \"%s\" and, in the same batch, \"%s\"\n", output->text.c_str(), other->text.c_str());

  // A single engine must produce the same bits in all logits. No batch, block, transport or chunk changes an order of
  // additions (CONTRIBUTING.md, decision D1).
  const auto expected = std::make_shared<Output>();
  alone.engine.submit(make_sequence(request, {}, expected, nullptr, nullptr));
  while (alone.engine.step()) continue;
  for (const Side* side : {&p, &d, &alone}) side->memory->check_invariants();
  const bool same = output->logits_hash == expected->logits_hash;
  std::printf("logits hash %016lx %s that of one engine alone\n", output->logits_hash,
              same ? "equals" : "DIFFERS from");
  return same ? 0 : 1;
}

}  // namespace xpyd::server
