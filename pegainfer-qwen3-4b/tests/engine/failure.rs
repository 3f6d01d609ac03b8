//! A step that fails.

use crate::support::process::in_own_process;
use crate::support::{best, engine, fails_a_step, options};

#[test]
fn a_refused_request_ends_alone_unless_the_device_is_lost() {
    in_own_process(|| fails_a_step(&mut engine(best(), &options()), best()));
}
