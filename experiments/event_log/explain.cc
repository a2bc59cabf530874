#include "experiments/event_log/explain.h"

#include <algorithm>
#include <cstdio>

namespace xpyd::disagg {
namespace {

template <class... Args>
std::string formatted(const char* format, const Args&... args) {
  char text[160];
  std::snprintf(text, sizeof text, format, args...);
  return text;
}

double ttft_s(const RequestTrace& trace) { return trace.first > 0 ? trace.first - trace.t : 0; }
double second_s(const RequestTrace& trace) { return trace.second > 0 ? trace.second - trace.t : 0; }

}  // namespace

HeldKv held_kv(const RequestTrace& trace) {
  const double prompt = trace.prompt, end_s = trace.ended;
  const auto mark = [&](double s, double otherwise) { return s > 0 ? s : otherwise; };
  const auto area = [&](double begin_s, double finish_s, double from, double to) {
    return trace.kv_token_bytes * std::max(0.0, finish_s - begin_s) * (from + to) / 2;
  };
  if (trace.started <= 0) return {};
  const double done_s = mark(trace.prompt_done, mark(trace.first, end_s)), joined_s = mark(trace.joined, end_s);
  const double computing = area(trace.started, done_s, trace.cached, prompt);
  if (trace.prefill.empty() || trace.prefill == trace.decode)
    return {0, computing + area(done_s, end_s, prompt, prompt + trace.output)};
  const double granted_s = mark(trace.granted, joined_s);
  return {computing + area(done_s, joined_s, prompt, prompt),
          area(granted_s, joined_s, prompt, prompt) + area(joined_s, end_s, prompt, prompt + trace.output)};
}

std::string attribution_header() {
  std::string header = "request,prompt,cached";
  for (const char* name : kPhases) header += std::string(",") + name + "_s";
  return header + ",ttft_s,second_token_s,prefill,decode,kv_prefill_gb_s,kv_decode_gb_s";
}

std::string attribution_row(const RequestTrace& trace) {
  std::string row = std::to_string(trace.request) + formatted(",%d,%d", trace.prompt, trace.cached);
  for (double seconds : attribute(trace)) row += formatted(",%.6f", seconds);
  return row + formatted(",%.6f,%.6f,", ttft_s(trace), second_s(trace)) + trace.prefill + "," + trace.decode +
         formatted(",%.6g,%.6g", 1e-9 * held_kv(trace).prefill, 1e-9 * held_kv(trace).decode);
}

std::string attribution_line(const RequestTrace& trace) {
  std::string line = "request " + std::to_string(trace.request) +
                     formatted(": first token after %.6f s, second token after %.6f s:", ttft_s(trace),
                               second_s(trace));
  const auto seconds = attribute(trace);
  for (size_t i = 0; i < kPhases.size(); ++i)
    if (seconds[i] > 0) line += formatted(" %s %.6f", kPhases[i], seconds[i]);
  const HeldKv held = held_kv(trace);
  if (held.prefill > 0) line += formatted("; KV on P %.6g GB s", 1e-9 * held.prefill);
  if (held.decode > 0)
    line += formatted("%s KV on %s %.6g GB s", held.prefill > 0 ? "," : ";", held.prefill > 0 ? "D" : "its instance",
                      1e-9 * held.decode);
  return line;
}

}  // namespace xpyd::disagg
