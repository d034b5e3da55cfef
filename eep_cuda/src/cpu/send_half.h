// The first half of a dispatch, with what it shares with the second.
#ifndef EEP_CPU_SEND_HALF_H_
#define EEP_CPU_SEND_HALF_H_

#include "cpu/context.h"
#include "hosts/loan.h"

namespace eep {

int dispatch_send(eep_context* context, const eep_dispatch_send_args* args, hosts::Loan& loan);

}  // namespace eep

#endif  // EEP_CPU_SEND_HALF_H_
