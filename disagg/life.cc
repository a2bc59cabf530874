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
  until(life.joined, 4);
  until(life.decoding, 5);
  if (life.first > 0) until(last, 6);
  return all;
}

std::array<double, kPhases.size()> attribute(const RequestLife& life) {
  std::array<double, kPhases.size()> seconds = {};
  for (const Phase& phase : phases(life)) seconds[phase.kind] += phase.end_s - phase.begin_s;
  return seconds;
}

std::string attribution_header() {
  std::string header = "request,prompt,cached";
  for (const char* name : kPhases) header += std::string(",") + name + "_s";
  return header + ",ttft_s,second_token_s,prefill,decode";
}

std::string attribution_row(const RequestLife& life) {
  std::string row = std::to_string(life.request) + formatted(",%d,%d", life.prompt, life.cached);
  for (double seconds : attribute(life)) row += formatted(",%.6f", seconds);
  return row + formatted(",%.6f,%.6f,", ttft_s(life), second_s(life)) + life.prefill + "," + life.decode;
}

std::string attribution_line(const RequestLife& life) {
  std::string line = "request " + std::to_string(life.request) +
                     formatted(": first token after %.6f s, second after %.6f s:", ttft_s(life), second_s(life));
  const auto seconds = attribute(life);
  for (size_t i = 0; i < kPhases.size(); ++i)
    if (seconds[i] > 0) line += formatted(" %s %.6f", kPhases[i], seconds[i]);
  return line;
}

}  // namespace xpyd::disagg
