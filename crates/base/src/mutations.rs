//! Deliberate faults that the simulator must find, in machines that run in production without them.

/// Declares a struct of switches, each a deliberate fault with what it breaks.
///
/// With the crate's feature `simulated`, and in its own tests, they are fields. Without it they are constants: no flipped bit
/// turns a fault on, and the code behind it is not there. Machines ask by a method of the switch's name.
#[macro_export]
macro_rules! mutations {
    ($(#[$of:meta])* pub struct $name:ident { $($(#[$doc:meta])* $switch:ident),+ $(,)? }) => {
        $(#[$of])*
        #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
        pub struct $name {
            $($(#[$doc])* #[cfg(any(test, feature = "simulated"))] pub $switch: bool,)+
        }

        impl $name {
            $($(#[$doc])*
            #[cfg(any(test, feature = "simulated"))]
            #[inline]
            pub(crate) const fn $switch(self) -> bool {
                self.$switch
            }

            $(#[$doc])*
            #[cfg(not(any(test, feature = "simulated")))]
            #[inline]
            pub(crate) const fn $switch(self) -> bool {
                false
            })+
        }
    };
}
