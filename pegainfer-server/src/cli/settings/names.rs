//! Which flags are settings, and their names in the environment.

use clap::{Arg, ArgAction};

/// Variables that other parts of PegaInfer read at build time, at run time or in tests. No flag may have one of these names.
pub const OTHER_VARIABLES: [&str; 8] = [
    "PEGAINFER_BLASLT",
    "PEGAINFER_CHECK_OVERLAP",
    "PEGAINFER_CUDA",
    "PEGAINFER_CUDA_SM",
    "PEGAINFER_FEATURES",
    "PEGAINFER_HUB_PLAIN_HTTP",
    "PEGAINFER_TEST_",
    "PEGAINFER_TRITON_PYTHON",
];

/// Name of a flag's variable in the environment.
pub fn variable_name(long: &str) -> String {
    format!("PEGAINFER_{}", long.to_ascii_uppercase().replace('-', "_"))
}

/// Whether an argument is a flag that can be set: all but positional ones, `--help` and `--version`.
pub fn is_setting(arg: &Arg) -> bool {
    let is_set = matches!(arg.get_action(), ArgAction::Set | ArgAction::Append | ArgAction::SetTrue);
    is_set && arg.get_long().is_some() && !arg.is_hide_set()
}
