#pragma once

#include <tuple>

#include "checks.h"

namespace fastlayers {

Tensor monarch_linear_cpu(Tensor x, std::vector<Tensor> weights, std::optional<Tensor> bias,
                          std::vector<int64_t> in_dims, std::vector<int64_t> out_dims, int64_t out_features,
                          bool contiguous);

std::tuple<Tensor, std::vector<Tensor>, Tensor> monarch_linear_backward_cpu(
    Tensor grad_out, Tensor x, std::vector<Tensor> weights, std::vector<int64_t> in_dims,
    std::vector<int64_t> out_dims, bool contiguous, bool need_x, bool need_weights, bool need_bias);

}  // namespace fastlayers
