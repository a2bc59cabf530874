// GET /stats: the data that the page draws.
#include <algorithm>

#include "base/json/json.h"
#include "server/openai/api.h"

namespace xpyd::server {
namespace {

// Times are in microseconds. The phases of an ended request sum to its total time; the last phase of a running one is
// still growing.
void add_trace(JsonText& out, RequestTrace trace, double now) {
  const bool over = trace.ended > 0;
  if (!over) {
    const bool crosses = trace.prefill != trace.decode;
    double& mark = trace.placed == 0                                                     ? trace.placed
                   : trace.started == 0                                                  ? trace.started
                   : trace.prompt_done == 0 && trace.first == 0                          ? trace.prompt_done
                   : crosses && trace.granted == 0 && trace.joined == 0 && !trace.second ? trace.granted
                   : crosses && trace.joined == 0 && !trace.second                       ? trace.joined
                   : trace.second == 0                                                   ? trace.second
                                                                                         : trace.ended;
    mark = trace.ended = now;
    if (trace.first > 0 && trace.second == 0) trace.second = now;
  }
  const auto us = [](double seconds) { return std::llround(1e6 * std::max(0.0, seconds)); };
  out.open('{').add("request", trace.request, "age_us", us(now - trace.t), "prefill", trace.prefill, "decode",
                    trace.decode);
  const auto seconds = attribute(trace);
  double before = 0;
  out.key("us").open('{');
  for (size_t i = 0; i < kPhases.size(); ++i) out.add(kPhases[i], us(seconds[i])), before += seconds[i];
  out.add("decode", us(trace.ended - trace.t - before)).close('}');
  out.add("ttft_us", trace.first > 0 ? us(trace.first - trace.t) : 0, "prompt", trace.prompt, "cached", trace.cached);
  out.add("output", trace.output, "attempts", trace.attempts, "finish", over ? trace.finish : "").close('}');
}

}  // namespace

std::string stats_body(const ServedModel& model, const ServiceStats& stats, const ServicePicture& picture,
                       const std::string& switches) {
  JsonText out;
  out.open('{').add("model", model.name, "max_model_len", model.max_model_len);
  out.add("has_chat", model.chat_template != nullptr && model.tokenizer != nullptr, "shared_pool", stats.shared_pool);
  out.key("instances").open('[');
  for (const InstanceStats& i : stats.instances) {
    const KvStats& kv = i.kv;
    out.open('{').add("name", i.name, "running", i.running, "waiting", i.waiting);
    out.add("remote_prefilling", i.queue_remote_prefilling, "sending", i.queue_prefill_sending);
    out.key("blocks").object("capacity", kv.capacity, "free", kv.free, "active", kv.active, "cached", kv.cached,
                             "in_transfer", kv.in_transfer);
    out.add("prefix_query_tokens", kv.prefix_query_tokens, "prefix_hit_tokens", kv.prefix_hit_tokens);
    out.add("transfers", i.transfers, "transfer_bytes", i.transfer_bytes).close('}');
  }
  out.close(']').key("answers").open('[');
  for (const RequestTrace& trace : picture.traces) add_trace(out, trace, picture.t);
  return out.close(']').key("switches").raw(switches).close('}').take();
}

}  // namespace xpyd::server
