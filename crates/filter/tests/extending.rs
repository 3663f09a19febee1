//! docs/internals/extending.md shows the code that there is.

const DOC: &str = include_str!("../../../docs/internals/extending.md");
const CODE: &str = include_str!("../src/delay.rs");

#[test]
fn the_code_in_the_guide_is_the_filters() {
    let blocks: Vec<&str> =
        DOC.split("```rust\n").skip(1).map(|rest| rest.split("```").next().unwrap_or_default()).collect();
    assert!(blocks.len() >= 6, "{} blocks of code", blocks.len());
    for block in blocks {
        assert!(CODE.contains(block.trim_end()), "the guide shows what is not in delay.rs:\n{block}");
    }
}
