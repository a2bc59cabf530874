#include "disagg/life.h"

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

double ttft_s(const RequestLife& life) { return life.first > 0 ? life.first - life.t : 0; }
double second_s(const RequestLife& life) { return life.second > 0 ? life.second - life.t : 0; }

}  // namespace

// Each mark ends a phase that the last mark before it began; one that is missing, or earlier, ends nothing. Nothing is
// later than the last token that counts.
std::vector<Phase> phases(const RequestLife& life) {
  std::vector<Phase> all;
  const double last = life.second > 0 ? life.second : life.first > 0 ? life.first : life.ended;
  double at = life.t;
  const auto until = [&](double mark, size_t kind) {
    mark = std::min(mark, last);
    if (mark <= at) return;
    all.push_back({kind, at, mark});
    at = mark;
  };
  until(life.placed, 0);
  until(std::min(life.fetching, life.started), 1);
  until(std::min(life.fetched, life.started), 2);
  until(life.started, 1);
  until(life.prompt_done > 0 ? life.prompt_done : life.first, 3);
  until(life.granted, 4);
  until(life.joined, 5);
  until(life.decoding, 6);
  if (life.first > 0) until(last, 7);
  return all;
}

std::array<double, kPhases.size()> attribute(const RequestLife& life) {
  std::array<double, kPhases.size()> seconds = {};
  for (const Phase& phase : phases(life)) seconds[phase.kind] += phase.end_s - phase.begin_s;
  return seconds;
}

HeldKv held_kv(const RequestLife& life) {
  const double prompt = life.prompt, end_s = life.ended;
  const auto mark = [&](double s, double otherwise) { return s > 0 ? s : otherwise; };
  const auto area = [&](double begin_s, double finish_s, double from, double to) {
    return life.kv_token_bytes * std::max(0.0, finish_s - begin_s) * (from + to) / 2;
  };
  if (life.started <= 0) return {};
  const double done_s = mark(life.prompt_done, mark(life.first, end_s)), joined_s = mark(life.joined, end_s);
  const double computing = area(life.started, done_s, life.cached, prompt);
  if (life.prefill.empty() || life.prefill == life.decode)
    return {0, computing + area(done_s, end_s, prompt, prompt + life.output)};
  const double granted_s = mark(life.granted, joined_s);
  return {computing + area(done_s, joined_s, prompt, prompt),
          area(granted_s, joined_s, prompt, prompt) + area(joined_s, end_s, prompt, prompt + life.output)};
}

std::string attribution_header() {
  std::string header = "request,prompt,cached";
  for (const char* name : kPhases) header += std::string(",") + name + "_s";
  return header + ",ttft_s,second_token_s,prefill,decode,kv_prefill_gb_s,kv_decode_gb_s";
}

std::string attribution_row(const RequestLife& life) {
  std::string row = std::to_string(life.request) + formatted(",%d,%d", life.prompt, life.cached);
  for (double seconds : attribute(life)) row += formatted(",%.6f", seconds);
  return row + formatted(",%.6f,%.6f,", ttft_s(life), second_s(life)) + life.prefill + "," + life.decode +
         formatted(",%.6g,%.6g", 1e-9 * held_kv(life).prefill, 1e-9 * held_kv(life).decode);
}

std::string attribution_line(const RequestLife& life) {
  std::string line = "request " + std::to_string(life.request) +
                     formatted(": first token after %.6f s, second after %.6f s:", ttft_s(life), second_s(life));
  const auto seconds = attribute(life);
  for (size_t i = 0; i < kPhases.size(); ++i)
    if (seconds[i] > 0) line += formatted(" %s %.6f", kPhases[i], seconds[i]);
  const HeldKv held = held_kv(life);
  if (held.prefill > 0) line += formatted("; KV on P %.6g GB s", 1e-9 * held.prefill);
  if (held.decode > 0)
    line += formatted("%s KV on %s %.6g GB s", held.prefill > 0 ? "," : ";", held.prefill > 0 ? "D" : "its instance",
                      1e-9 * held.decode);
  return line;
}

}  // namespace xpyd::disagg
