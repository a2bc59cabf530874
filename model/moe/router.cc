#include "model/moe/router.h"

#include <algorithm>
#include <cmath>

namespace xpyd::model {

// Every comparison with NaN is false, so a score that is NaN is used if it comes first and displaces none; the ids stay
// distinct. All weights of the row are then NaN, so the logits become NaN, too, and the request ends with an error.
void top_experts(const float* scores, int count, int used, int* chosen) {
  int n = 0;  // chosen so far, the highest score first
  for (int e = 0; e < count; ++e) {
    if (n == used && !(scores[e] > scores[chosen[n - 1]])) continue;
    int at = n < used ? n++ : n - 1;
    for (; at > 0 && scores[e] > scores[chosen[at - 1]]; --at) chosen[at] = chosen[at - 1];
    chosen[at] = e;
  }
  std::sort(chosen, chosen + used);
}

ExpertRows::ExpertRows(const Experts& experts, int max_tokens) : experts_(experts), begin_(size_t(experts.count) + 1) {
  const size_t rows = size_t(max_tokens) * size_t(experts.used);
  tokens_.resize(rows), chosen_.resize(rows), rows_.resize(rows), weights_.resize(rows);
}

void ExpertRows::choose(float* scores, int n, RowTeam& team) {
  const int count = experts_.count, used = experts_.used;
  const Ops& ops = team.ops();
  team.for_rows(n, 4 * count, [&](int i) {
    float* p = scores + size_t(i) * size_t(count);
    int* chosen = &chosen_[place(i, 0)];
    top_experts(p, count, used, chosen);
    const Largest peak = ops.peak(p, count);
    ops.exp(p, peak.value, 1, count, p);
    double sum = peak.nans > 0 ? NAN : 0;
    if (experts_.renormalise)
      for (int j = 0; j < used; ++j) sum += double(p[chosen[j]]);
    else
      sum += ops.sum(p, count);
    for (int j = 0; j < used; ++j) weights_[place(i, j)] = float(double(p[chosen[j]]) / sum);
  });
  const size_t n_rows = size_t(n) * size_t(used);
  std::fill(begin_.begin(), begin_.end(), 0);
  for (size_t r = 0; r < n_rows; ++r) ++begin_[size_t(chosen_[r]) + 1];
  for (size_t e = 0; e < size_t(count); ++e) begin_[e + 1] += begin_[e];
  for (size_t r = 0; r < n_rows; ++r) {
    rows_[r] = begin_[size_t(chosen_[r])]++;
    tokens_[size_t(rows_[r])] = int(r) / used;
  }
  // Each begin is now its expert's end.
  for (size_t e = size_t(count); e > 0; --e) begin_[e] = begin_[e - 1];
  begin_[0] = 0;
}

}  // namespace xpyd::model
