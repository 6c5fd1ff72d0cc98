#pragma once

#include <tuple>

#include "checks.h"

namespace fastlayers {

Tensor linear_list_cpu(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
                       bool out_channel_last);

std::tuple<Tensor, Tensor, Tensor> linear_list_backward_cpu(const Tensor& grad_out, const Tensor& x,
                                                            const Tensor& weight, bool need_x,
                                                            bool need_weight, bool need_bias);

}  // namespace fastlayers
