// wire_kv: when the KV of a prompt is at D, by the rate of the wire and by what crosses (--wire-kv-dtype).
//
// The simulator (experiments/simulate/): 1P1D, a prompt of 4,096 tokens of Llama-3.1-8B in one step, KV in bf16, layer by
// layer. A form that has r of the bytes is a wire that is 1/r as fast. `ready_ms`: until D can go on, from arrival; the
// first token is P's, and does not wait for the wire. P packs and D widens at `convert`: `card`, at .8 of an H100's
// 3.35 TB/s, reading and writing; `core`, at what one core with AVX2 does, 2 GB/s of bf16 rows packed and 3 widened.
// Nothing of it hides. `auto` is what choose_wire_kv() says of the
// prompt with these costs and the simulator's own.
//
// Arithmetic. 4,096 tokens are 537 MB in bf16; a row of 128 is 256 bytes, 132 in int8, 68 in int4: 277 and 143 MB, .516
// and .266. P computes 148 ms, 4.6 a layer. 1 Gb/s: 4.29, 2.21, 1.14 s on the wire, of which the computation hides at
// most its 143 ms: D is ready after 4.3, 2.2, 1.15 s, as the bytes. 10 Gb/s: 429 ms, 222 and 114; int4 is 3.6 ms a
// layer, less than a layer computes: 148 + 3.6, .35 of off. 25 Gb/s: off is 5.4 ms a layer, 148 + 5.4 + 31 x .8 = 177;
// int8 and int4 hide but for a layer: 151 and 149, .85. 100 Gb/s: 1.3 ms are left of off and .4 of int4, 1 % of the
// whole; a card converts in 0.5 ms: .997. A core takes .27 and .18 s: worth it at 1 Gb/s (1.15 + .45 = 1.6, .37 of
// off), and at none of the others (10 Gb/s: .15 + .45 > .43).
//
// wire_kv_logits: what it costs in accuracy. The demo model's real 1P1D, f32 KV, local wire: 40 facts and 8 questions
// about them a draw, 12 greedy tokens each. `agreement`: of the tokens that D computes those up to the first that
// differs from `off`; `answers`: of the questions those with the fact's value in the text; `largest_logprob_error`: of
// tokens that agree. int8 moves a logit of this model by a percent of its size (kv_dtype_logits): of 11 tokens of an
// answer few can change. int4 moves it 16 times as far, which changed the token in up to 15 % of the positions of its
// text; here the first change ends the count of an answer, so that more is lost. Rows of 64 f32 are 256 bytes, 68 in
// int8, 36 in int4: .266 and .141.
#include "disagg/handover/wire_kv.h"

#include <algorithm>
#include <cmath>
#include <map>

#include "disagg/cluster.h"
#include "experiments/demo_facts.h"
#include "experiments/demo_model.h"
#include "experiments/lengths.h"
#include "experiments/simulated.h"

namespace xpyd::experiments::wire_kv_experiment {
namespace {

using namespace disagg;

constexpr int kPrompt = 4096;
constexpr WireKv kForms[] = {WireKv::off, WireKv::int8, WireKv::int4, WireKv::automatic};

WireKv form_named(const std::string& name) {
  return WireKv(std::ranges::find(kWireKvNames, name) - std::begin(kWireKvNames));
}

std::vector<Values> points(const Setting& setting) {
  std::vector<Values> all;
  for (const char* convert : {"card", "core"})
    for (double rate : setting.tiny ? std::vector<double>{10} : std::vector<double>{1, 10, 25, 100})
      for (WireKv form : kForms)
        all.push_back({{"convert", convert}, {"gbps", rate}, {"form", kWireKvNames[int(form)]}});
  return all;
}

Result<Finding> run(const Values& point, const Setting& setting) {
  const int prompt = kPrompt / (setting.tiny ? 4 : 1);
  Trace trace{.block_tokens = 16};
  add_request(trace, 0, prompt, 4);
  SimulationOptions options = simulated_h100("1P1D", trace);
  set_step_tokens(options, prompt);
  options.kv_tokens = 16000;
  Finding found;
  double first_s = 0;
  const auto gap_s = [&](double bytes_per_s) {
    options.hardware.link_bytes_per_s = bytes_per_s;
    const Result<Simulation> simulated = simulate(options, trace);
    found.wrong = simulated ? unserved(simulated.value(), trace) : simulated.error().message;
    if (!found.wrong.empty()) return 0.0;
    first_s = simulated.value().records[0].times.first_s - simulated.value().records[0].arrival_s;
    return double(simulated.value().records[0].times.gaps[0]);
  };
  const double without = gap_s(kNoWire);
  if (!found.wrong.empty()) return found;
  const double rate = double(point["gbps"]) * 1e9 / 8, bytes = options.model.kv_token_bytes() * prompt;
  const KvShape shape{.n_layers = 32, .n_kv_heads = 8, .head_dim = 128, .dtype = Dtype::bf16};
  const auto share = [&](WireKv form) {
    return form == WireKv::off ? 1 : double(wire_row_bytes(shape, form)) / double(shape.row_bytes());
  };
  const bool card = point["convert"] == "card";
  const auto convert_s = [&](WireKv form, double core_bytes_per_s) {
    return form == WireKv::off ? 0 : card ? bytes * (1 + share(form)) / (3.35e12 * 0.8) : bytes / core_bytes_per_s;
  };
  constexpr double kPack = 2e9, kWiden = 3e9;
  WireKv form = form_named(point["form"]);
  if (form == WireKv::automatic)
    form = choose_wire_kv(
        {.bytes = bytes,
         .int8_bytes = bytes * share(WireKv::int8),
         .int4_bytes = bytes * share(WireKv::int4),
         .pack_int8_s = convert_s(WireKv::int8, kPack),
         .pack_int4_s = convert_s(WireKv::int4, kPack),
         .widen_int8_s = convert_s(WireKv::int8, kWiden),
         .widen_int4_s = convert_s(WireKv::int4, kWiden),
         .wire_s_per_byte = 1 / rate,
         .compute_s = step_cost(options.model, options.hardware).seconds(model::prompt_steps(prompt, 0, prompt)),
         .overlap = overlap(StreamKv::layer, false, shape.n_layers, prompt, prompt)});
  const double exposed = gap_s(rate / share(form)) - without;
  const double converting = convert_s(form, kPack) + convert_s(form, kWiden);
  if (!found.wrong.empty()) return found;
  found.rows.push_back({{"crosses", kWireKvNames[int(form)]},
                        {"wire_mb", 1e-6 * bytes * share(form)},
                        {"first_token_ms", 1e3 * first_s},
                        {"exposed_ms", 1e3 * exposed},
                        {"convert_ms", 1e3 * converting},
                        {"ready_ms", 1e3 * (first_s + exposed + converting)}});
  return found;
}

Measure open(const Setting& setting) {
  return [setting](const Values& point) { return run(point, setting); };
}

REGISTER_EXPERIMENT("wire_kv", "cpu", points, open);

// --- wire_kv_logits ---

struct Answer {
  std::vector<int32_t> tokens;
  std::vector<double> logprobs;
  std::string text;
};

class Answers final : public EventSink {
 public:
  void on_event(TokenEvent event) override {
    Answer& a = all[event.request_id];
    if (event.token >= 0) a.tokens.push_back(event.token), a.logprobs.push_back(double(event.sampled.chosen.logprob));
    a.text += event.text;
    ended += event.finish != FinishReason::none;
  }
  std::map<uint64_t, Answer> all;
  int ended = 0;
};

struct Demo : DemoModel {
  int draw = -1;
  DemoFacts facts;
  std::vector<size_t> asked;
  std::map<uint64_t, Answer> plain;  // of `off`
};

constexpr int kStep = 512, kBatch = 8;

Result<Finding> ask(Demo& demo, WireKv form, std::map<uint64_t, Answer>& answers, ServiceStats& stats) {
  RealClock clock;
  ClusterOptions options;
  options.topology = parse_topology("1P1D").value();
  options.kv_scheme = find_kv_scheme("paged");
  options.kv.shape = kv_shape(demo.config, Dtype::f32);
  options.kv.pool_bytes = size_t{16000} * options.kv.shape.token_bytes();
  options.kv.prefix_cache = false;  // or D, without --wire-kv-dtype, would have the facts of the question before
  options.batching = find_batch_policy("chunked");
  options.placement = find_placement_policy("least_loaded");
  options.transport = find_transport("local");
  options.step_tokens = kStep;
  options.max_batch = kBatch;
  options.max_model_len = demo.config.max_position;
  options.tokenizer = demo.tokenizer.get();
  options.kv_checksum = true;
  options.wire_kv = form;
  options.make_model = [&demo](int, DeviceQueue&) { return make_llama(demo.weights, demo.team, kStep, kBatch); };
  auto cluster = Cluster::create(std::move(options), clock);
  if (!cluster) return cluster.error();
  auto sink = std::make_shared<Answers>();
  for (size_t i = 0; i < demo.asked.size(); ++i) {
    auto request = std::make_shared<Request>();
    request->id = i + 1;
    request->prompt = demo.tokenizer->encode(demo.facts.text + "What is the " + demo.facts.known[demo.asked[i]].first +
                                             "?");
    request->sampling.temperature = 0;
    request->sampling.top_logprobs = 0;
    request->max_tokens = 12;
    request->ignore_eos = true;
    if (Status taken = cluster.value()->submit(request, sink); !taken) return taken.error();
  }
  while (cluster.value()->turn()) {
  }
  if (sink->ended != int(demo.asked.size())) return Finding{{}, "a question was not answered"};
  answers = std::move(sink->all);
  stats = cluster.value()->stats();
  return Finding{};
}

std::vector<Values> logits_points(const Setting&) {
  std::vector<Values> all;
  for (int draw = 0; draw < kDraws; ++draw)
    for (const char* form : {"off", "int8", "int4"}) all.push_back({{"form", form}, {"sample", draw}});
  return all;
}

Measure open_logits(const Setting& setting) {
  auto demo = std::make_shared<Demo>();
  return [demo, setting](const Values& point) -> Result<Finding> {
    if (Status loaded = demo->load(); !loaded) return loaded.error();
    ServiceStats stats;
    if (const int draw = point["sample"]; demo->draw != draw) {
      demo->draw = draw;
      Random random(seed_of(setting, draw) + 1);
      demo->facts = demo_facts(random, setting.tiny ? 6 : 40);
      demo->asked.clear();
      for (int i = 0; i < (setting.tiny ? 2 : 8); ++i) demo->asked.push_back(random.below(demo->facts.known.size()));
      const Result<Finding> asked = ask(*demo, WireKv::off, demo->plain, stats);
      if (!asked || !asked.value().wrong.empty()) return asked;
    }
    std::map<uint64_t, Answer> answers;
    const Result<Finding> asked = ask(*demo, form_named(point["form"]), answers, stats);
    if (!asked || !asked.value().wrong.empty()) return asked;
    if (stats.instances[1].kv_refused > 0) return Finding{{}, "KV did not come as it was sent"};
    int64_t tokens = 0, same = 0, right = 0;
    double worst = 0;
    for (const auto& [id, answer] : answers) {
      const Answer& plain = demo->plain.at(id);
      right += answer.text.find(demo->facts.known[demo->asked[size_t(id - 1)]].second) != std::string::npos;
      tokens += int64_t(plain.tokens.size()) - 1;  // without P's
      for (size_t i = 1; i < plain.tokens.size() && answer.tokens[i] == plain.tokens[i]; ++i) {
        ++same;
        worst = std::max(worst, std::abs(answer.logprobs[i] - plain.logprobs[i]));
      }
    }
    return Finding{{{{"tokens", tokens},
                     {"agreement", double(same) / double(tokens)},
                     {"answers", double(right) / double(answers.size())},
                     {"largest_logprob_error", worst},
                     {"wire_bytes", stats.instances[0].transfer_bytes},
                     {"converted_bytes", stats.instances[0].converted_bytes}}},
                   ""};
  };
}

REGISTER_EXPERIMENT("wire_kv_logits", "cpu", logits_points, open_logits);

}  // namespace
}  // namespace xpyd::experiments::wire_kv_experiment
