#include "server/openai/metrics.h"

#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <functional>

#include "disagg/conductor/admission.h"

namespace xpyd::server {
namespace {

constexpr const char* kRejectNames[] = {"invalid",    "too_long",     "unavailable",   "draining",
                                        "overloaded", "unauthorized", "unknown_model", "objective"};

std::string number_text(double value) {
  if (std::isnan(value)) return "NaN";
  if (std::isinf(value)) return value > 0 ? "+Inf" : "-Inf";
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

double resident_bytes() {
  long pages = 0;
  if (FILE* file = std::fopen("/proc/self/statm", "r")) {
    if (std::fscanf(file, "%*s %ld", &pages) != 1) pages = 0;
    std::fclose(file);
  }
  return static_cast<double>(pages) * static_cast<double>(sysconf(_SC_PAGESIZE));
}

// The rows for which KV metrics are written. Instances that share a pool would all report the same blocks, so these are
// written once.
std::vector<InstanceStats> kv_rows(const ServiceStats& service) {
  std::vector<InstanceStats> rows = service.instances;
  if (service.shared_pool && !rows.empty()) {
    rows.resize(1);
    rows[0].name = "pool";
  }
  return rows;
}

}  // namespace

void Histogram::observe(double value) {
  size_t i = static_cast<size_t>(std::lower_bound(bounds_.begin(), bounds_.end(), value) - bounds_.begin());
  ++counts_[i];
  sum_ += value;
  ++count_;
}

// Writes metric families one after another, each with its HELP and TYPE and all its samples. `all`: the instances that
// a family has samples of, unless it names others.
class MetricsText {
 public:
  MetricsText(std::string prefix, const std::string& model, std::span<const InstanceStats> all)
      : prefix_(std::move(prefix) + ":"), model_("model_name=\"" + label_value(model) + "\""), all_(all) {}

  void family(const std::string& name, const char* type, const char* help, bool prefixed = true) {
    name_ = (prefixed ? prefix_ : "") + name;
    out_ += "# HELP " + name_ + " " + help + "\n# TYPE " + name_ + " " + type + "\n";
  }
  template <class T>
  void sample(const std::string& labels, T value, const char* suffix = "") {
    out_ += name_ + suffix + (labels.empty() ? "" : "{" + labels + "}") + " " + number_text(double(value)) + "\n";
  }
  std::string engine(std::string_view name, const std::string& more = "") const {
    return model_ + ",engine=\"" + label_value(name) + "\"" + (more.empty() ? "" : "," + more);
  }
  template <class T>
  void counter(const std::string& name, const char* help, T value) {
    family(name, "counter", help);
    sample(engine("all"), value);
  }
  void histogram(const std::string& name, const char* help, const Histogram& h) {
    family(name, "histogram", help);
    uint64_t below = 0;
    for (size_t i = 0; i < h.counts_.size(); ++i) {
      below += h.counts_[i];
      std::string le = i < h.bounds_.size() ? number_text(h.bounds_[i]) : "+Inf";
      sample(engine("all", "le=\"" + le + "\""), below, "_bucket");
    }
    sample(engine("all"), h.sum_, "_sum");
    sample(engine("all"), h.count_, "_count");
  }
  // A histogram of transfers of which only sum and count are known.
  template <class F>
  void totals(const std::string& name, const char* help, F sum) {
    if (all_.empty()) return;
    family(name, "histogram", help);
    for (const auto& instance : all_) {
      const int64_t n = instance.transfers;
      sample(engine(instance.name, "le=\"+Inf\""), n, "_bucket");
      sample(engine(instance.name), instance.*sum, "_sum");
      sample(engine(instance.name), n, "_count");
    }
  }
  // One sample per instance and label value. The value is a field of a part of the instance's state.
  template <class Field, class Part>
  void labelled(const std::string& name, const char* help, std::span<const InstanceStats> all, const std::string& label,
                Part part, std::initializer_list<std::pair<const char*, Field>> values) {
    family(name, gauge_or_counter(name), help);
    for (const auto& instance : all)
      for (const auto& [value, field] : values)
        sample(engine(instance.name, label + "=\"" + value + "\""), std::invoke(part, instance).*field);
  }
  template <class Field, class Part>
  void labelled(const std::string& name, const char* help, const std::string& label, Part part,
                std::initializer_list<std::pair<const char*, Field>> values) {
    labelled(name, help, all_, label, part, values);
  }
  // One sample per instance.
  template <class F>
  void each(const std::string& name, const char* help, std::span<const InstanceStats> all, F value) {
    family(name, gauge_or_counter(name), help);
    for (const auto& instance : all) sample(engine(instance.name), std::invoke(value, instance));
  }
  template <class F>
  void each(const std::string& name, const char* help, F value) {
    each(name, help, all_, value);
  }
  std::string take() { return std::move(out_); }

 private:
  static const char* gauge_or_counter(const std::string& name) {  // Prometheus's naming convention
    return name.ends_with("_total") ? "counter" : "gauge";
  }
  std::string prefix_, model_, name_, out_;
  std::span<const InstanceStats> all_;
};

std::vector<double> Metrics::tokens_up_to(int max_tokens) {
  std::vector<double> bounds;
  for (double ten = 1;; ten *= 10)
    for (double step : {1.0, 2.0, 5.0}) {
      if (ten * step > max_tokens && !bounds.empty()) return bounds;
      bounds.push_back(ten * step);
    }
}

bool Metrics::valid_prefix(std::string_view prefix) {
  auto good = [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_';
  };
  return !prefix.empty() && prefix.size() <= 64 && !(prefix[0] >= '0' && prefix[0] <= '9') &&
         std::all_of(prefix.begin(), prefix.end(), good);
}

void Metrics::first_token(double ttft_s, int prompt_tokens, int cached_tokens) {
  ttft_.observe(ttft_s);
  prompt_tokens_ += static_cast<uint64_t>(prompt_tokens);
  cached_prompt_tokens_ += static_cast<uint64_t>(cached_tokens);
}

void Metrics::inter_token(double s) { inter_token_.observe(s); }

void Metrics::finished(const FinishedRequest& r) {
  for (FinishReason reason : r.finishes) ++finishes_[static_cast<size_t>(reason)];
  n_.observe(r.n);
  max_tokens_.observe(r.max_tokens);
  prompt_tokens_per_request_.observe(r.prompt_tokens);
  e2e_.observe(std::max(0.0, r.last_token_s - r.arrival_s));
  preemptions_.observe(r.preemptions);
  if (r.first_token_s == 0) return;  // no first token, so none of the intervals below exists
  for (int tokens : r.generated) generation_tokens_per_request_.observe(tokens);
  max_generated_.observe(*std::max_element(r.generated.begin(), r.generated.end()));
  queue_.observe(std::max(0.0, r.scheduled_s - r.queued_s));
  prefill_.observe(std::max(0.0, r.first_token_s - r.scheduled_s));
  const double decode_s = std::max(0.0, r.last_token_s - r.first_token_s);
  decode_.observe(decode_s);
  if (const int longest = *std::max_element(r.generated.begin(), r.generated.end()); longest > 1)
    time_per_token_.observe(decode_s / (longest - 1));
  inference_.observe(std::max(0.0, r.last_token_s - r.scheduled_s));
}

void Metrics::http_request(std::string_view handler, std::string_view method, int status) {
  bool known = method == "GET" || method == "POST" || method == "HEAD";
  ++http_[{std::string(handler), known ? std::string(method) : "other", std::to_string(status / 100) + "xx"}];
}

namespace {

using I = const InstanceStats&;  // an instance's value is a function of its stats

void render_queues(MetricsText& text) {
  using S = InstanceStats;
  text.each("num_requests_running", "Number of sequences in the running batch.", &S::running);
  text.each("num_requests_waiting", "Number of requests that wait for their first step.", &S::waiting);
  text.labelled<int S::*>("num_requests_waiting_by_reason",
                          "Waiting requests by reason; capacity: the same as num_requests_waiting; deferred: the same "
                          "as num_requests_remote_prefilling.",
                          "reason", std::identity(),
                          {{"capacity", &S::waiting}, {"deferred", &S::queue_remote_prefilling}});
  text.each("num_requests_remote_prefilling",
            "Number of requests whose prompt is computed on another instance and whose KV will come here.",
            &S::queue_remote_prefilling);
  text.each("num_requests_sending", "Number of prefilled requests whose KV is being sent.", &S::queue_prefill_sending);
}

// The KV memory and its prefix cache.
void render_kv(MetricsText& text, const std::vector<InstanceStats>& pools) {
  using S = InstanceStats;
  const auto kv = [](auto field) { return [field](I i) { return i.kv.*field; }; };
  auto usage = [](I i) { return i.kv.capacity == 0 ? 0.0 : double(i.kv.active + i.kv.in_transfer) / i.kv.capacity; };
  text.each("kv_cache_usage_perc", "Share of KV blocks in use, from 0 to 1.", pools, usage);
  text.each("gpu_cache_usage_perc", "Old name of kv_cache_usage_perc.", pools, usage);

  text.labelled<int KvStats::*>(
      "kv_blocks", "Number of KV blocks by state; the states sum to the capacity.", pools, "state", &S::kv,
      {{"free", &KvStats::free},
       {"active", &KvStats::active},
       {"cached", &KvStats::cached},
       {"in_transfer", &KvStats::in_transfer}});
  text.each("kv_blocks_capacity", "Number of KV blocks in the pool.", pools, kv(&KvStats::capacity));
  text.labelled<int64_t KvStats::*>(
      "kv_bytes",
      "Bytes of the KV pool by use; written: holds KV; reserved: kept for tokens to come (slots); internal: the rest "
      "of blocks in use; idle: free for any sequence; external: in no block.",
      pools, "state", &S::kv,
      {{"written", &KvStats::written_bytes},
       {"reserved", &KvStats::reserved_bytes},
       {"internal", &KvStats::internal_bytes},
       {"idle", &KvStats::idle_bytes},
       {"external", &KvStats::external_bytes}});
  text.each("kv_capacity_bytes", "Bytes of the KV pool.", pools, kv(&KvStats::capacity_bytes));
  text.each(
      "kv_mapped_bytes",
      "Bytes of the KV pool that are mapped to addresses (vattention, slots with --slot-prealloc; otherwise all).",
      pools, kv(&KvStats::mapped_bytes));
  text.each("kv_mappings",
            "Number of memory mappings that the KV pool takes (vattention; otherwise one per rank); vm.max_map_count "
            "limits it.",
            kv(&KvStats::mappings));
  text.family("cache_config_info", "gauge", "Shape of the KV memory, in labels.");
  for (I i : pools)
    text.sample(text.engine(i.name, "block_size=\"" + std::to_string(i.kv.block_tokens) + "\",num_gpu_blocks=\"" +
                                        std::to_string(i.kv.capacity) + "\""),
                1);
  text.each("kv_evictions_total", "Number of cached blocks that were evicted and given to other tokens.",
            kv(&KvStats::evictions));

  text.each("prefix_cache_queries_total", "Number of prompt tokens looked up in the prefix cache.",
            kv(&KvStats::prefix_query_tokens));
  text.each("prefix_cache_hits_total", "Number of prompt tokens found in the prefix cache.",
            kv(&KvStats::prefix_hit_tokens));
  text.each("num_preemptions_total", "Number of preemptions: sequences sent back to the queue.", &S::preemptions);
}

// KV transfers: from prefill to decode, and prefixes fetched from another instance.
void render_transfers(MetricsText& text) {
  using S = InstanceStats;
  text.each("kv_transfer_bytes_total", "KV bytes that this instance transferred: sent, or pulled.", &S::transfer_bytes);
  text.each("kv_transfer_seconds_total", "Seconds spent in KV transfers.", &S::transfer_seconds);
  text.each("kv_transfer_descriptors_total", "Number of contiguous copies in KV transfers.", &S::transfer_descriptors);
  text.each("kv_transfers_total", "Number of KV transfers.", &S::transfers);
  text.totals("nixl_bytes_transferred", "KV bytes per transfer, on the instance that started it.", &S::transfer_bytes);
  text.totals("nixl_num_descriptors", "Number of contiguous copies per transfer.", &S::transfer_descriptors);
  text.totals("nixl_post_time_seconds", "Seconds to plan and start a transfer.", &S::transfer_seconds);
  text.each("nixl_num_failed_transfers_total", "Same as kv_refused_total.", &S::kv_refused);
  text.each("nixl_num_kv_expired_reqs_total", "Same as kv_leases_expired_total.", &S::leases_expired);
  text.each("kv_refused_total", "Number of prompts computed again because their KV was incomplete.", &S::kv_refused);
  text.each("kv_leases_expired_total", "Number of reservations given up because the peer stopped responding.",
            &S::leases_expired);
  const auto fetch = [](auto field) { return [field](I i) { return i.fetch.*field; }; };
  text.each("kv_fetches_total", "Number of prefixes fetched from another instance (--kv-fetch).",
            fetch(&FetchStats::fetches));
  text.each("kv_fetched_tokens_total", "Number of tokens in fetched prefixes.", fetch(&FetchStats::tokens));
  text.each("kv_fetches_failed_total", "Number of fetched prefixes that did not arrive, or arrived late.",
            fetch(&FetchStats::failed));
  text.each("kv_fetch_seconds_total", "Seconds from the request of a prefix to the end of its fetch.",
            fetch(&FetchStats::seconds));
  text.each("kv_fetch_regret_seconds_total",
            "Seconds that fetches took beyond the predicted time to compute the same tokens.",
            fetch(&FetchStats::regret_s));
  text.each("kv_lent_total", "Number of prefixes lent to other instances.", fetch(&FetchStats::lent));
  text.each("kv_lent_tokens_total", "Number of tokens in lent prefixes.", fetch(&FetchStats::lent_tokens));
  text.each("kv_lent_expired_total", "Number of lent prefixes given up because the reader stopped responding.",
            fetch(&FetchStats::expired));
}

// The conductor: attempts, SLOs of --admission, predictions and their outcomes, members.
void render_conductor(MetricsText& text, const ConductorStats& c) {
  text.family("global_prefill_queue_length", "gauge",
              "Number of prompts that no prefill instance has taken yet (--disagg decode_first).");
  text.sample(text.engine("all"), c.prefill_jobs);
  text.counter("attempts_total", "Number of attempts to serve choices of requests.", c.attempts);
  text.counter("attempts_failed_total", "Number of attempts that failed because of an instance.", c.failed_attempts);
  text.counter("choices_replaced_total", "Number of choices that continued on another instance.", c.replaced_choices);
  text.family("requests_refused_total", "counter",
              "Number of requests refused by --admission; early: on arrival; late: after their prompt was computed.");
  text.sample(text.engine("all", "when=\"early\""), c.refused_early);
  text.sample(text.engine("all", "when=\"late\""), c.refused_late);
  text.family("requests_refused_by_total", "counter",
              "Number of requests refused by --admission, by the objective that would have been missed.");
  for (int i = 1; i < kRefusals; ++i)
    text.sample(text.engine("all", "objective=\"" + std::string(refusal_name(Refusal::Why(i))) + "\""),
                c.refused_by[size_t(i)]);
  text.counter("prefill_wasted_seconds_total",
               "Predicted seconds of prefill wasted on requests that were refused after it.", c.wasted_prefill_s);
  text.counter("choices_ended_total", "Number of choices that ended by stop or length.", c.ended);
  text.counter("choices_kept_total",
               "Number of choices that ended by stop or length and met both objectives (goodput).", c.kept);
  text.each("step_prediction_error", "Mean relative error of predicted step times: |predicted - measured| / measured.",
            [](I i) { return i.cost_error.mape(); });
  text.each("step_prediction_bias",
            "Mean signed relative error of predicted step times: (predicted - measured) / measured.",
            [](I i) { return i.cost_error.bias(); });
  const auto prediction = [&](const std::string& of, const PredictionError& error) {
    text.family(of + "_prediction_error", "gauge",
                "Mean relative error of the placement's predictions: |predicted - measured| / measured.");
    text.sample(text.engine("all"), error.mape());
    text.family(of + "_prediction_bias", "gauge",
                "Mean signed relative error of the placement's predictions: (predicted - measured) / measured.");
    text.sample(text.engine("all"), error.bias());
  };
  prediction("ttft", c.ttft_error);
  prediction("tbt", c.tbt_error);
  text.counter("tokens_late_total", "Number of tokens dropped because their attempt had been given up.", c.late_tokens);
  text.counter("instances_joined_total", "Number of instances that joined.", c.joined);
  text.counter("instances_left_total", "Number of instances that left or were lost.", c.left);
}

void render_page_groups(MetricsText& text) {
  const auto mapping = [](auto field) { return [field](I i) { return i.kv.vattention.*field; }; };
  text.each("kv_map_calls_total", "Number of calls that mapped page groups (vattention).",
            mapping(&VattentionStats::map_calls));
  text.each("kv_unmap_calls_total", "Number of calls that unmapped page groups (vattention).",
            mapping(&VattentionStats::unmap_calls));
  text.each("kv_map_wait_seconds_total", "Seconds for which the engine waited for page groups to be mapped.",
            mapping(&VattentionStats::map_wait_seconds));
}

// Host memory and disk below the pool.
void render_tiers(MetricsText& text) {
  using T = OffloadStats;
  const auto tier = [](auto field) { return [field](I i) { return i.kv.tiers.*field; }; };
  const auto tiers = [](I i) -> const T& { return i.kv.tiers; };
  text.labelled<int64_t T::*>("kv_tier_blocks", "Number of KV blocks in the offload tiers, by tier.", "tier", tiers,
                              {{"host", &T::host_blocks}, {"disk", &T::disk_blocks}});
  text.labelled<int64_t T::*>("kv_tier_blocks_capacity", "Capacity of the offload tiers in KV blocks, by tier.", "tier",
                              tiers, {{"host", &T::host_capacity}, {"disk", &T::disk_capacity}});
  text.labelled<int64_t T::*>("kv_tier_hit_tokens_total",
                              "Number of prompt tokens whose KV was loaded from an offload tier, by tier.", "tier",
                              tiers, {{"host", &T::host_hit_tokens}, {"disk", &T::disk_hit_tokens}});
  text.each("external_prefix_cache_queries_total", "Number of prompt tokens that the pool's prefix cache did not have.",
            [](I i) { return i.kv.prefix_query_tokens - i.kv.prefix_hit_tokens; });
  text.each("external_prefix_cache_hits_total", "Number of prompt tokens that only an offload tier had.",
            [](I i) { return i.kv.tiers.host_hit_tokens + i.kv.tiers.disk_hit_tokens; });
  text.each("kv_offload_store_bytes_total", "KV bytes copied from pool to host.", tier(&T::bytes_out));
  text.each("kv_offload_load_bytes_total", "KV bytes copied from host to pool.", tier(&T::bytes_in));
  text.each("kv_offload_cpu_cache_usage_perc", "Share of host blocks in use, from 0 to 1.", [](I i) {
    return double(i.kv.tiers.host_blocks) / double(std::max<int64_t>(1, i.kv.tiers.host_capacity));
  });
  text.labelled<int64_t T::*>("kv_tier_evictions_total", "Number of blocks evicted from a tier, by tier.", "tier",
                              tiers, {{"host", &T::host_evictions}, {"disk", &T::disk_evictions}});
  text.labelled<int64_t T::*>("kv_tier_bytes_total", "KV bytes copied between tiers, by direction.", "way", tiers,
                              {{"pool_to_host", &T::bytes_out},
                               {"host_to_pool", &T::bytes_in},
                               {"host_to_disk", &T::disk_bytes_written},
                               {"disk_to_host", &T::disk_bytes_read}});
  text.labelled<int64_t T::*>("kv_tier_copies_total",
                              "Number of contiguous copies between pool and host, by direction.", "way", tiers,
                              {{"pool_to_host", &T::copies_out}, {"host_to_pool", &T::copies_in}});
  text.labelled<int64_t T::*>("kv_tier_failures_total",
                              "Number of failed disk operations; after the first one the disk is not used.", "what",
                              tiers, {{"write", &T::failed_writes}, {"read", &T::failed_reads}});
  text.each("kv_tier_dropped_blocks_total", "Number of full blocks that were not offloaded, for lack of room or time.",
            tier(&T::dropped_out));
  text.each("kv_tier_load_seconds_total", "Seconds for which sequences waited for their KV to be loaded.",
            tier(&T::load_wait_seconds));
}

// The engines: what requests occupy and compute, and the engines' steps.
void render_engines(MetricsText& text, std::span<const InstanceStats> all) {
  using S = InstanceStats;
  text.labelled<double Spent::*>(
      "kv_occupation_gb_seconds_total",
      "VRAM occupation cost: the integral of the KV held here over time, in GB s; a block that several sequences hold "
      "counts for each of them. Phases: prompts being computed (prefill), sequences that decode (decode), KV held for "
      "a transfer (transfer). Divided by the number of ended requests it is the cost of one.",
      "phase", &S::spent,
      {{"prefill", &Spent::prefill_gb_s}, {"decode", &Spent::decode_gb_s}, {"transfer", &Spent::transfer_gb_s}});
  text.each("model_flops_total", "FLOPs of forward passes as the model counts them: matrix products and attention.",
            [](I i) { return 1e12 * i.spent.tflop; });
  std::vector<InstanceStats> rated(all.begin(), all.end());
  std::erase_if(rated, [](I i) { return i.spent.peak_tflops == 0 || i.step_seconds == 0; });
  if (!rated.empty())
    text.each("mfu",
              "Model FLOPs utilization: model_flops_total / engine_step_seconds_total / peak, where the peak counts "
              "f32 multiply-adds in registers of the instance's threads, two operations each, as measured by `xpyd "
              "peak` on this machine. Absent without such a measurement.",
              rated, [](I i) { return i.spent.tflop / i.step_seconds / i.spent.peak_tflops; });
  text.each("engine_steps_total", "Number of forward passes.", &S::steps);
  text.each("engine_step_seconds_total", "Seconds in forward passes and sampling.", &S::step_seconds);
  text.each("engine_wait_seconds_total",
            "Seconds of engine_step_seconds_total spent waiting for the model; the rest is work on the CPU.",
            &S::wait_seconds);
  text.each("scheduler_step_seconds_total", "Seconds spent planning steps.", &S::schedule_seconds);
  text.each("engine_prompt_tokens_total",
            "Number of prompt tokens computed in steps; tokens whose KV was reused do not count, and tokens computed "
            "again count each time. If nothing is computed again, the sum over instances is prompt_tokens_total - "
            "prompt_tokens_cached_total, once requests have their first token.",
            &S::prompt_tokens);
  text.each("engine_generation_tokens_total", "Number of tokens sampled.", &S::generated_tokens);
  text.each("spec_decode_num_draft_tokens_total", "Number of draft tokens that were verified (--speculate).",
            &S::draft_tokens);
  text.each("spec_decode_num_accepted_tokens_total", "Number of draft tokens that were accepted (--speculate).",
            &S::accepted_tokens);
}

}  // namespace

void Metrics::render_requests(MetricsText& text) const {
  text.counter("prompt_tokens_total",
               "Number of prompt tokens, computed or reused, of requests that got a first token.", prompt_tokens_);
  text.counter("generation_tokens_total", "Number of output tokens.", generation_tokens_);
  text.counter("prompt_tokens_cached_total", "Number of tokens of prompt_tokens_total whose KV was reused.",
               cached_prompt_tokens_);
  text.family("request_success_total", "counter", "Number of ended choices, by reason.");
  constexpr std::pair<FinishReason, const char*> kReasons[] = {
      {FinishReason::stop, "stop"},       {FinishReason::length, "length"}, {FinishReason::abort, "abort"},
      {FinishReason::timeout, "timeout"}, {FinishReason::error, "error"},   {FinishReason::refused, "refused"}};
  for (auto [reason, name] : kReasons)
    text.sample(text.engine("all", std::string("finished_reason=\"") + name + "\""),
                finishes_[static_cast<size_t>(reason)]);
  text.family("requests_rejected_total", "counter", "Number of requests rejected before they ran, by reason.");
  for (size_t i = 0; i < rejected_.size(); ++i)
    text.sample(text.engine("all", std::string("reason=\"") + kRejectNames[i] + "\""), rejected_[i]);
}

void Metrics::render_histograms(MetricsText& text) const {
  text.histogram("time_to_first_token_seconds", "Seconds from arrival at the frontend to the first token.", ttft_);
  text.histogram("inter_token_latency_seconds", "Seconds from one token of a choice to the next.", inter_token_);
  text.histogram("time_per_output_token_seconds", "Old name of inter_token_latency_seconds.", inter_token_);
  text.histogram("request_time_per_output_token_seconds",
                 "Mean seconds per output token after the first, of a request's longest choice.", time_per_token_);
  text.histogram("request_num_preemptions", "Number of preemptions of a request.", preemptions_);
  text.histogram("e2e_request_latency_seconds", "Seconds from arrival to the last token.", e2e_);
  text.histogram("request_queue_time_seconds", "Seconds from arrival at the engine to the first step.", queue_);
  text.histogram("request_prefill_time_seconds", "Seconds from the first step to the first token.", prefill_);
  text.histogram("request_decode_time_seconds", "Seconds from the first token to the last token.", decode_);
  text.histogram("request_inference_time_seconds", "Seconds from the first step to the last token.", inference_);
  text.histogram("request_prompt_tokens", "Number of prompt tokens of a request.", prompt_tokens_per_request_);
  text.histogram("request_generation_tokens", "Number of output tokens of a choice.", generation_tokens_per_request_);
  text.histogram("request_max_num_generation_tokens", "Number of output tokens of a request's longest choice.",
                 max_generated_);
  text.histogram("request_params_max_tokens", "Value of max_tokens in a request.", max_tokens_);
  text.histogram("request_params_n", "Value of n in a request.", n_);
}

void Metrics::render_process(MetricsText& text) const {
  text.family("http_requests_total", "counter", "Number of HTTP answers, by route, method and status class.", false);
  for (const auto& [key, count] : http_)
    text.sample("handler=\"" + label_value(key[0]) + "\",method=\"" + key[1] + "\",status=\"" + key[2] + "\"", count);
  text.family("process_resident_memory_bytes", "gauge", "Resident memory in bytes.", false);
  text.sample("", resident_bytes());
}

std::string Metrics::render(const ServiceStats& service) const {
  const std::vector<InstanceStats>& all = service.instances;
  MetricsText text(prefix_, model_name_, all);
  render_queues(text);
  render_kv(text, kv_rows(service));
  render_transfers(text);
  render_conductor(text, service.conductor);
  render_page_groups(text);
  if (std::ranges::any_of(all, [](I i) { return i.kv.tiers.host_capacity > 0; })) render_tiers(text);
  render_engines(text, all);
  render_requests(text);
  render_histograms(text);
  render_process(text);
  return text.take();
}

}  // namespace xpyd::server
