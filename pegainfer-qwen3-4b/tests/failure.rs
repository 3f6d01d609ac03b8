//! A step that fails.

mod support;

use support::{best, engine, fails_a_step, options};

#[test]
fn a_refused_request_ends_alone_unless_the_device_is_lost() {
    fails_a_step(&mut engine(best(), &options()), best());
}
