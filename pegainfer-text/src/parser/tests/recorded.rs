//! Recorded model outputs and their parser events, see [`describe`](super::describe).

/// Texts and their events.
pub type Recorded = &'static [(&'static str, &'static [&'static str])];

/// Outputs of Qwen3.
pub const HERMES: Recorded = &[
    ("Hello.", &["C Hello."]),
    (" Hello \n", &["C  Hello \n"]),
    ("", &[]),
    ("<think>\nhm\n\nyes\n</think>\n\nParis.", &["R hm\n\nyes", "C Paris."]),
    ("<think>\n\n</think>\n\nParis.", &["C Paris."]),
    ("\n <think>a</think>b</think>", &["R a", "C b</think>"]),
    ("<think>cut off\n</thi", &["R cut off\n</thi"]),
    ("<thi", &["C <thi"]),
    ("a <think>b</think>", &["C a <think>b</think>"]),
    (
        "<think>\nI call <tool_call>.\n</think>\n\n<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": 1}}\n</tool_call>",
        &["R I call <tool_call>.", "T0 f", "A0 {\"a\": 1}", "E0 true"],
    ),
    (
        "Let me see.\n<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": \"}]\\\"</tool_call>\\\\\", \"b\": [{}, \"é🎉\\u00e9\"]}}\n</tool_call>\n<tool_call>\n{\"name\": \"g\", \"arguments\": {}}\n</tool_call>",
        &[
            "C Let me see.",
            "T0 f",
            "A0 {\"a\": \"}]\\\"</tool_call>\\\\\", \"b\": [{}, \"é🎉\\u00e9\"]}",
            "E0 true",
            "T1 g",
            "A1 {}",
            "E1 true",
        ],
    ),
    // Reordered keys, other keys, other forms of the arguments.
    ("<tool_call>{\"arguments\": {\"a\": 1}, \"name\": \"f\"}</tool_call>", &["T0 f", "A0 {\"a\": 1}", "E0 true"]),
    (
        "<tool_call>{\"id\": 1, \"name\": \"f\", \"parameters\": {}, \"x\": \"}\"}</tool_call>z",
        &["T0 f", "A0 {}", "E0 true", "C z"],
    ),
    ("<tool_call>{\"name\": \"f\"}</tool_call>", &["T0 f", "A0 {}", "E0 true"]),
    ("<tool_call>{\"name\": \"f\", \"arguments\": null}</tool_call>", &["T0 f", "A0 {}", "E0 true"]),
    (
        "<tool_call>{\"name\": \"f\", \"arguments\": \"{\\\"a\\\": \\\"é\\\"}\"}</tool_call>",
        &["T0 f", "A0 {\"a\": \"é\"}", "E0 true"],
    ),
    ("<tool_call>{\"n\\u0061me\": \"\\u0066\", \"arguments\":{}}</tool_call>", &["T0 f", "A0 {}", "E0 true"]),
    // Mistakes that leave the call usable.
    (
        "<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": 1}\n</tool_call>.",
        &["T0 f", "A0 {\"a\": 1}", "E0 true", "C ."],
    ),
    ("<tool_call>{\"name\": \"f\", \"arguments\": {}}}}</tool_call>", &["T0 f", "A0 {}", "E0 true"]),
    (
        "<tool_call>{\"name\": \"f\", \"arguments\": {}}\n<tool_call>{\"name\": \"g\", \"arguments\": {}}",
        &["T0 f", "A0 {}", "E0 true", "T1 g", "A1 {}", "E1 true"],
    ),
    (
        "<tool_call>\n<tool_call>\n{\"name\": \"f\", \"arguments\": {}}\n</tool_call>",
        &["C <tool_call>", "T0 f", "A0 {}", "E0 true"],
    ),
    // Mistakes inside the arguments, which end at the tag; the rest is parsed again.
    (
        "<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": \"x}\n</tool_call>\nDone.",
        &["T0 f", "A0 {\"a\": \"x}\"}", "E0 true", "C Done."],
    ),
    ("<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": [1</tool_call>", &["T0 f", "A0 {\"a\": [1]}", "E0 true"]),
    // No calls.
    ("Use <tool_call> like this.", &["C Use <tool_call> like this."]),
    ("<tool_call>\n{\"name\": 5}\n</tool_call>", &["C <tool_call>\n{\"name\": 5}\n</tool_call>"]),
    ("<tool_call>{\"name\": \"\"}</tool_call>", &["C <tool_call>{\"name\": \"\"}</tool_call>"]),
    ("<tool_call>{\"arguments\": {}}</tool_call>", &["C <tool_call>{\"arguments\": {}}</tool_call>"]),
    (
        "<tool_call>{\"name\": \"f\", \"arguments\": [1]}</tool_call>",
        &["C <tool_call>{\"name\": \"f\", \"arguments\": [1]}</tool_call>"],
    ),
    ("<tool_call>{\"name\": \"f}\n</tool_call>", &["C <tool_call>{\"name\": \"f}\n</tool_call>"]),
    ("a < b <tool", &["C a < b <tool"]),
    // Cut off.
    ("ok\n<tool_call>\n{\"name\": \"f\", \"argu", &["C ok", "T0 f", "A0 {}", "E0 false"]),
    ("<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": \"b\n<", &["T0 f", "A0 {\"a\": \"b\"}", "E0 false"]),
    (
        "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": \"b\"}\n</tool_c",
        &["T0 f", "A0 {\"a\": \"b\"}", "E0 true"],
    ),
];

/// Outputs of Qwen3.5.
pub const CODER: Recorded = &[
    ("<think>\nhm\n</think>\n\nHello <b>.", &["R hm", "C Hello <b>."]),
    (
        "I look.\n\n<tool_call>\n<function=f>\n<parameter=text>\na \"b\"\n\\ é🎉\n\n</parameter>\n<parameter=n>\n42\n</parameter>\n<parameter=list>\n[1, {\"a\": null}]\n</parameter>\n</function>\n</tool_call>\n",
        &[
            "C I look.",
            "T0 f",
            "A0 {\"text\": \"a \\\"b\\\"\\n\\\\ é🎉\\n\", \"n\": 42, \"list\": [1,{\"a\":null}]}",
            "E0 true",
        ],
    ),
    (
        "<tool_call>\n<function=f>\n</function>\n</tool_call>\n<tool_call>\n<function=g>\n<parameter=x>1</parameter></function></tool_call>",
        &["T0 f", "A0 {}", "E0 true", "T1 g", "A1 {\"x\": \"1\"}", "E1 true"],
    ),
    (
        "<tool_call><function=f><parameter=maybe>\nnull\n</parameter><parameter=n>\nmany\n</parameter></function></tool_call>",
        &["T0 f", "A0 {\"maybe\": null, \"n\": \"many\"}", "E0 true"],
    ),
    // Tags inside a value, and tags that are missing.
    (
        "<tool_call>\n<function=f>\n<parameter=text>\nx </function> <parameter=y> </tool_call>\n<p\n</parameter>\n</function>\n</tool_call>",
        &["T0 f", "A0 {\"text\": \"x </function> <parameter=y> </tool_call>\\n<p\"}", "E0 true"],
    ),
    (
        "<tool_call>\n<function=f>\n<parameter=text>\na\n<parameter=n>\n1\n</function>\n</tool_call> z",
        &["T0 f", "A0 {\"text\": \"a\", \"n\": 1}", "E0 true", "C z"],
    ),
    (
        "<tool_call>\n<function=f>\n<parameter=text>\n<parameter=n>\n\n</parameter>\n</tool_call>",
        &["T0 f", "A0 {\"text\": \"\"}", "E0 true"],
    ),
    (
        "<tool_call>\n<function=f>\n<parameter=n>\n1\n</parameter>\noops\n</function>\n</tool_call>",
        &["T0 f", "A0 {\"n\": 1}", "E0 true", "C oops"],
    ),
    // JSON in the tag, as Qwen3 writes it.
    ("<tool_call>\n{\"name\": \"f\"}\n</tool_call>", &["T0 f", "A0 {}", "E0 true"]),
    // Reasoning that is not closed before the call, and reasoning that only mentions one.
    ("<think>\nhm\n<tool_call>\n<function=f>\n</function>\n</tool_call>", &["R hm", "T0 f", "A0 {}", "E0 true"]),
    ("<think>\nA <tool_call> <x> </think>ok", &["R A <tool_call> <x> ", "C ok"]),
    // No calls.
    ("<tool_call><function=\n>", &["C <tool_call><function=\n>"]),
    ("<tool_call><function=>", &["C <tool_call><function=>"]),
    // Cut off.
    ("<tool_call>\n<function=f", &["C <tool_call>\n<function=f"]),
    ("<tool_call>\n<function=f>\n<parameter=te", &["T0 f", "A0 {}", "E0 false"]),
    ("<tool_call>\n<function=f>\n<parameter=text>\nab\n<", &["T0 f", "A0 {\"text\": \"ab\"}", "E0 false"]),
    ("<tool_call>\n<function=f>\n<parameter=n>\n1", &["T0 f", "A0 {}", "E0 false"]),
    ("<tool_call>\n<function=f>\n<parameter=text>\nab\n</function>\n", &["T0 f", "A0 {\"text\": \"ab\"}", "E0 true"]),
    (
        "<tool_call>\n<function=f>\n<parameter=n>\n1\n</parameter>\n</function>\n</tool",
        &["T0 f", "A0 {\"n\": 1}", "E0 true"],
    ),
];
