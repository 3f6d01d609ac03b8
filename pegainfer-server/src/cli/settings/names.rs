//! Which flags are settings, and their names in the environment.

use clap::{Arg, ArgAction, Command};
use std::collections::BTreeSet;
use std::ffi::OsString;

/// Similarity (Jaro-Winkler, from 0 to 1) above which a name is suggested for an unknown one.
const SIMILAR: f64 = 0.75;

/// Variables that other parts of PegaInfer read at build time or at run time. No flag may have one of these names.
pub const OTHER_VARIABLES: [&str; 10] = [
    "PEGAINFER_BLASLT",
    "PEGAINFER_CHECK_OVERLAP",
    "PEGAINFER_CUDA",
    "PEGAINFER_CUDA_SM",
    "PEGAINFER_FEATURES",
    "PEGAINFER_FORCE_SM",
    "PEGAINFER_HUB_API",
    "PEGAINFER_HUB_PLAIN_HTTP",
    "PEGAINFER_STEP_TIMES",
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

/// Long names of the flags of a command and its subcommands.
pub(super) fn known_flags(command: &Command) -> BTreeSet<String> {
    let own = command.get_arguments().filter(|arg| is_setting(arg)).filter_map(|arg| arg.get_long());
    own.map(str::to_owned).chain(command.get_subcommands().flat_map(known_flags)).collect()
}

/// The known name that the user may have meant.
pub(crate) fn nearest<'a>(name: &str, known: &'a BTreeSet<String>) -> Option<&'a str> {
    let name = name.replace('_', "-").to_lowercase();
    let scored = known.iter().map(|known| (strsim::jaro_winkler(&name, known), known.as_str()));
    scored.max_by(|a, b| a.0.total_cmp(&b.0)).filter(|(score, _)| *score > SIMILAR).map(|(_, known)| known)
}

/// One sentence for each variable of PegaInfer's prefix that nothing reads.
pub fn unknown_variables(root: &Command, variables: impl Iterator<Item = OsString>) -> Vec<String> {
    let known = known_flags(root);
    // Kubernetes sets PEGAINFER_SERVICE_HOST, PEGAINFER_PORT_8000_TCP and the like next to a service called pegainfer.
    let others = ["PEGAINFER_TEST_", "PEGAINFER_SERVICE_", "PEGAINFER_PORT_"];
    let unknown = variables.filter_map(|name| name.into_string().ok()).filter(|name| {
        let is_other = OTHER_VARIABLES.contains(&name.as_str()) || others.iter().any(|prefix| name.starts_with(prefix));
        name.starts_with("PEGAINFER_") && !is_other && !known.iter().any(|long| variable_name(long) == *name)
    });
    let sentence = |name: String| match nearest(name.trim_start_matches("PEGAINFER_"), &known) {
        Some(long) => format!("{name} is not a known setting; did you mean {}?", variable_name(long)),
        None => format!("{name} is not a known setting"),
    };
    unknown.map(sentence).collect()
}
