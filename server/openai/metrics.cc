#include "server/openai/metrics.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>
#include <string_view>

namespace xpyd::server {
namespace {

// A row is a family of samples, one per instance. A row without help continues the family above it with another label.
// The value NaN means that this instance has no sample.
template <class Stats>
struct Row {
  const char* name;
  const char* help;  // null: as above
  double (*value)(const Stats& stats);
  const char* label = "";
};

using I = const InstanceStats&;

// An instance without experts has no sample.
double of_experts(I i, double value) { return i.experts.layers > 0 ? value : std::numeric_limits<double>::quiet_NaN(); }

constexpr Row<InstanceStats> kInstanceRows[] = {
    {"num_requests_running", "Number of sequences in the running batch.", [](I i) { return double(i.running); }},
    {"num_requests_waiting", "Number of requests that wait for their first step.",
     [](I i) { return double(i.waiting); }},
    {"num_requests_remote_prefilling",
     "Number of requests whose prompt is computed on another instance and whose KV will come here.",
     [](I i) { return double(i.queue_remote_prefilling); }},
    {"num_requests_sending", "Number of prefilled requests whose KV is being sent.",
     [](I i) { return double(i.queue_prefill_sending); }},
    {"num_preemptions_total", "Number of preemptions: sequences sent back to the queue.",
     [](I i) { return double(i.preemptions); }},

    // The KV memory and its prefix cache.
    {"kv_cache_usage_perc", "Share of KV blocks in use, from 0 to 1.",
     [](I i) { return i.kv.capacity == 0 ? 0.0 : double(i.kv.active + i.kv.in_transfer) / i.kv.capacity; }},
    {"kv_blocks",
     "Number of KV blocks by state. Instances that share a pool all report it. If they are processes, each reports the "
     "blocks that it or nobody holds.",
     [](I i) { return double(i.kv.free); }, "state=\"free\""},
    {"kv_blocks", nullptr, [](I i) { return double(i.kv.active); }, "state=\"active\""},
    {"kv_blocks", nullptr, [](I i) { return double(i.kv.cached); }, "state=\"cached\""},
    {"kv_blocks", nullptr, [](I i) { return double(i.kv.in_transfer); }, "state=\"in_transfer\""},
    {"kv_reserved_blocks", "Number of KV blocks, free or cached, that are reserved for prompts (--reservation escrow).",
     [](I i) { return double(i.kv.reserved_blocks); }},
    {"kv_mapped_bytes",
     "Bytes of the KV pool that are mapped to addresses (vattention, slots with --slot-prealloc; otherwise all).",
     [](I i) { return double(i.kv.mapped_bytes); }},
    {"kv_evictions_total", "Number of cached blocks that were evicted and given to other tokens.",
     [](I i) { return double(i.kv.evictions); }},
    {"prefix_cache_queries_total", "Number of prompt tokens looked up in the prefix cache.",
     [](I i) { return double(i.kv.prefix_query_tokens); }},
    {"prefix_cache_hits_total", "Number of prompt tokens found in the prefix cache.",
     [](I i) { return double(i.kv.prefix_hit_tokens); }},

    // Host memory and disk below the pool.
    {"kv_tier_hit_tokens_total", "Number of prompt tokens whose KV was loaded from an offload tier, by tier.",
     [](I i) { return double(i.kv.tiers.host_hit_tokens); }, "tier=\"host\""},
    {"kv_tier_hit_tokens_total", nullptr, [](I i) { return double(i.kv.tiers.disk_hit_tokens); }, "tier=\"disk\""},
    {"kv_offload_store_bytes_total", "KV bytes copied from pool to host.",
     [](I i) { return double(i.kv.tiers.bytes_out); }},
    {"kv_offload_load_bytes_total", "KV bytes copied from host to pool.",
     [](I i) { return double(i.kv.tiers.bytes_in); }},
    {"kv_offload_store_seconds_total",
     "Seconds in which copies from pool to host were under way: from their start until the engine found their end.",
     [](I i) { return i.kv.tiers.store_seconds; }},
    {"kv_offload_load_seconds_total",
     "Seconds that requests waited for copies to the pool, from their start until the engine found their end.",
     [](I i) { return i.kv.tiers.load_wait_seconds; }},

    // KV transfers: from prefill to decode, and prefixes fetched from another instance.
    {"kv_transfers_total", "Number of KV transfers.", [](I i) { return double(i.transfers); }},
    {"kv_transfer_bytes_total", "KV bytes that this instance transferred: sent, or pulled.",
     [](I i) { return double(i.transfer_bytes); }},
    {"kv_transfer_seconds_total", "Seconds to plan and start KV transfers.", [](I i) { return i.transfer_seconds; }},
    {"kv_refused_total", "Number of prompts computed again because their KV was incomplete or corrupt.",
     [](I i) { return double(i.kv_refused); }},
    {"kv_fetches_total", "Number of prefixes fetched from another instance (--kv-fetch).",
     [](I i) { return double(i.fetch.fetches); }},
    {"kv_fetched_tokens_total", "Number of tokens in fetched prefixes.", [](I i) { return double(i.fetch.tokens); }},
    {"kv_copies_total", "Number of prompts of which this instance has read a copy (--decode-copies).",
     [](I i) { return double(i.fetch.copies); }},
    {"kv_copy_bytes_total", "KV bytes of these copies.", [](I i) { return double(i.fetch.copy_bytes); }},
    {"kv_copies_dropped_total", "Number of copies that found no room here or did not arrive.",
     [](I i) { return double(i.fetch.copies_dropped); }},

    // Experts. (expert_rows_total and expert_rank_rows_total have a sample for each expert and rank.)
    {"expert_layers_total", "Number of sparse layers computed, each step's.",
     [](I i) { return of_experts(i, double(i.experts.layers)); }},
    {"expert_imbalance",
     "Rows of the busiest tensor rank divided by the mean of the ranks: mean over all sparse layers computed. 1 unless "
     "ranks hold whole experts (--expert-parallel).",
     [](I i) { return of_experts(i, i.experts.imbalance / double(i.experts.layers)); }},
    {"expert_exchanged_bytes_total", "Bytes of experts' rows that tensor ranks read from other ranks.",
     [](I i) { return of_experts(i, i.experts.exchanged_bytes); }},

    // What requests occupy and compute, and the engine's steps.
    {"kv_occupation_gb_seconds_total",
     "VRAM occupation cost: the integral of the KV held here over time, in GB s; a block that several sequences hold "
     "counts for each of them. Phases: prompts being computed (prefill), sequences that decode (decode), KV held for "
     "a transfer (transfer). Divided by the number of ended requests it is the cost of one.",
     [](I i) { return i.spent.prefill_gb_s; }, "phase=\"prefill\""},
    {"kv_occupation_gb_seconds_total", nullptr, [](I i) { return i.spent.decode_gb_s; }, "phase=\"decode\""},
    {"kv_occupation_gb_seconds_total", nullptr, [](I i) { return i.spent.transfer_gb_s; }, "phase=\"transfer\""},
    {"model_flops_total", "FLOPs of forward passes as the model counts them: matrix products and attention.",
     [](I i) { return 1e12 * i.spent.tflop; }},
    {"mfu",
     "Model FLOPs utilization: model_flops_total / engine_step_seconds_total / peak, where the peak counts f32 "
     "multiply-adds in registers of the instance's threads, two operations each, as measured by `xpyd peak` on this "
     "machine. Absent without such a measurement.",
     [](I i) {
       if (i.spent.peak_tflops == 0 || i.step_seconds == 0) return std::numeric_limits<double>::quiet_NaN();
       return i.spent.tflop / i.step_seconds / i.spent.peak_tflops;
     }},
    {"engine_steps_total", "Number of forward passes.", [](I i) { return double(i.steps); }},
    {"engine_step_seconds_total", "Seconds in forward passes and sampling.", [](I i) { return i.step_seconds; }},
    {"engine_schedule_seconds_total", "Seconds of the engine between forward passes: planning, and events of tokens.",
     [](I i) { return i.schedule_seconds; }},
    {"engine_prompt_tokens_total",
     "Number of prompt tokens computed in steps; tokens whose KV was reused do not count, and tokens computed again "
     "count each time.",
     [](I i) { return double(i.prompt_tokens); }},
    {"engine_generation_tokens_total", "Number of tokens sampled.", [](I i) { return double(i.generated_tokens); }},
    {"spec_decode_num_draft_tokens_total", "Number of draft tokens that were verified (--speculate).",
     [](I i) { return double(i.draft_tokens); }},
    {"spec_decode_num_accepted_tokens_total", "Number of draft tokens that were accepted (--speculate).",
     [](I i) { return double(i.accepted_tokens); }},
};

using C = const ConductorStats&;

constexpr Row<ConductorStats> kConductorRows[] = {
    {"attempts_total", "Number of attempts to serve choices of requests.", [](C c) { return double(c.attempts); }},
    {"attempts_failed_total", "Number of attempts that failed because of an instance.",
     [](C c) { return double(c.failed_attempts); }},
    {"requests_refused_total", "Number of requests refused by --admission.",
     [](C c) { return double(c.refused_early + c.refused_late); }},
    {"choices_ended_total", "Number of choices that ended by stop or length.", [](C c) { return double(c.ended); }},
    {"choices_kept_total", "Number of choices that ended by stop or length and met both objectives (goodput).",
     [](C c) { return double(c.kept); }},
};

std::string number_text(double value) {
  char digits[40];
  return std::string(digits, std::to_chars(digits, digits + sizeof digits, value).ptr);
}

std::string label_value(std::string_view text) {
  std::string out;
  for (char c : text) {
    if (c == '\\' || c == '"') out += '\\';
    if (c == '\n')
      out += "\\n";
    else
      out += c;
  }
  return out;
}

// Writes metric families one after another, each with its HELP and TYPE and all its samples.
class MetricsText {
 public:
  explicit MetricsText(std::string_view model) : model_("model_name=\"" + label_value(model) + "\"") {}

  void family(std::string_view name, const char* help, const char* type) {
    name_ = "vllm:" + std::string(name);
    out_ += "# HELP " + name_ + " " + help + "\n# TYPE " + name_ + " " + type + "\n";
  }
  // By Prometheus's naming convention the name says which of the two it is.
  void gauge_or_counter(std::string_view name, const char* help) {
    family(name, help, name.ends_with("_total") ? "counter" : "gauge");
  }
  void sample(std::string_view engine, const std::string& label, double value, const char* suffix = "") {
    out_ += name_ + suffix + "{" + model_ + ",engine=\"" + label_value(engine) + "\"" + (label.empty() ? "" : ",") +
            label + "} " + number_text(value) + "\n";
  }
  void counter(const char* name, const char* help, uint64_t value) {
    family(name, help, "counter");
    sample("all", "", double(value));
  }
  void histogram(const char* name, const char* help, const Histogram& h) {
    family(name, help, "histogram");
    uint64_t below = 0;
    for (size_t i = 0; i < h.counts.size(); ++i) {
      below += h.counts[i];
      const std::string le = i < h.bounds.size() ? number_text(h.bounds[i]) : "+Inf";
      sample("all", "le=\"" + le + "\"", double(below), "_bucket");
    }
    sample("all", "", h.sum, "_sum");
    sample("all", "", double(h.count), "_count");
  }
  std::string take() { return std::move(out_); }

 private:
  const std::string model_;
  std::string name_, out_;
};

}  // namespace

void Histogram::observe(double value) {
  ++counts[size_t(std::lower_bound(bounds.begin(), bounds.end(), value) - bounds.begin())];
  sum += value;
  ++count;
}

void Metrics::first_token(double ttft_s, int prompt_tokens) {
  ttft_.observe(ttft_s);
  prompt_tokens_ += uint64_t(prompt_tokens);
}

void Metrics::finished(const FinishedRequest& r) {
  for (FinishReason reason : r.finishes) ++finishes_[size_t(reason)];
  e2e_.observe(std::max(0.0, r.last_token_s - r.arrival_s));
  if (r.first_token_s == 0) return;  // none of the intervals below exists
  queue_.observe(std::max(0.0, r.scheduled_s - r.queued_s));
  prefill_.observe(std::max(0.0, r.first_token_s - r.scheduled_s));
  decode_.observe(std::max(0.0, r.last_token_s - r.first_token_s));
}

std::string Metrics::render(const ServiceStats& service, const Sessions::Stats& sessions) const {
  MetricsText text(model_name_);
  for (const auto& row : kInstanceRows) {
    if (row.help != nullptr) text.gauge_or_counter(row.name, row.help);
    for (I instance : service.instances)
      if (const double value = row.value(instance); !std::isnan(value)) text.sample(instance.name, row.label, value);
  }
  const auto per_item = [&](const char* name, const char* help, const char* label, auto rows) {
    text.family(name, help, "counter");
    for (I instance : service.instances)
      for (size_t k = 0; k < (instance.experts.*rows).size(); ++k)
        text.sample(instance.name, std::string(label) + "=\"" + std::to_string(k) + "\"",
                    double((instance.experts.*rows)[k]));
  };
  per_item("expert_rows_total", "Number of tokens that used an expert, over all layers.", "expert", &ExpertLoad::rows);
  per_item("expert_rank_rows_total", "Number of tokens' experts that a tensor rank computed, whole or a slice of each.",
           "rank", &ExpertLoad::rank_rows);
  for (const auto& row : kConductorRows) {
    text.gauge_or_counter(row.name, row.help);
    text.sample("all", "", row.value(service.conductor));
  }
  text.counter("prompt_tokens_total",
               "Number of prompt tokens, computed or reused, of requests that got a first token.", prompt_tokens_);
  text.counter("generation_tokens_total", "Number of output tokens.", generation_tokens_);
  text.family("sessions", "Number of conversations that the server keeps (session_id).", "gauge");
  text.sample("all", "", sessions.sessions);
  text.family("session_bytes", "Bytes of these conversations, as token ids and messages.", "gauge");
  text.sample("all", "", double(sessions.bytes));
  text.counter("session_evictions_total",
               "Number of turns of sessions that found no KV of their history and computed it again from token ids.",
               evicted_sessions_);
  text.counter("session_evicted_kv_bytes_total", "KV bytes of these histories.", evicted_tokens_ * kv_token_bytes_);
  text.family("request_success_total", "Number of ended choices, by reason.", "counter");
  for (const FinishReason reason : {FinishReason::stop, FinishReason::length, FinishReason::abort,
                                    FinishReason::timeout, FinishReason::error, FinishReason::refused})
    text.sample("all", std::string("finished_reason=\"") + finish_reason_name(reason) + "\"",
                double(finishes_[size_t(reason)]));
  text.histogram("time_to_first_token_seconds", "Seconds from arrival at the frontend to the first token.", ttft_);
  text.histogram("inter_token_latency_seconds", "Seconds from one token of a choice to the next.", inter_token_);
  text.histogram("e2e_request_latency_seconds", "Seconds from arrival to the last token.", e2e_);
  text.histogram("request_queue_time_seconds", "Seconds from arrival at the engine to the first step.", queue_);
  text.histogram("request_prefill_time_seconds", "Seconds from the first step to the first token.", prefill_);
  text.histogram("request_decode_time_seconds", "Seconds from the first token to the last token.", decode_);
  return text.take();
}

}  // namespace xpyd::server
