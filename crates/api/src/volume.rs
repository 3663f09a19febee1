//! What a host says of a volume.

use crate::texts::texts;

texts! {
    /// How a volume stands, as the host sees it that is asked.
    pub enum VolumeState {
        /// In service here.
        Open = "open",
        /// Being opened here.
        Opening = "opening",
        /// Being closed here.
        Closing = "closing",
        /// Another host has taken it over, and this one knows.
        Deposed = "deposed",
        /// Another host is about to hand it over to this one.
        Warming = "warming",
        /// In service at another host; clients reach it here, too.
        Portal = "portal",
        /// In service at another host.
        Elsewhere = "elsewhere",
        /// In service nowhere.
        Closed = "closed",
        /// In service nowhere; the steward has it open.
        InCare = "in care",
        /// In service nowhere: its key could not be had.
        Locked = "locked",
        /// What only newer releases know.
        Other = "other",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Code;

    fn read<T: From<String>>(text: &str) -> T {
        T::from(text.to_string())
    }

    #[test]
    fn each_text_is_of_one_value_and_unknown_ones_are_of_the_last() {
        for state in VolumeState::ALL {
            assert_eq!(read::<VolumeState>(state.text()), *state);
        }
        for code in Code::ALL {
            assert_eq!(read::<Code>(code.text()), *code);
        }
        assert_eq!((read::<VolumeState>("frozen"), read::<Code>("cursed")), (VolumeState::Other, Code::Failed));
    }
}
