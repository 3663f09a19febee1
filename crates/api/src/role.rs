//! Who asks a host, and for what.

use crate::{Code, Error, Kind, Request};
use serde::Serialize;
use utoipa::ToSchema;

/// Who asks.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    Admin,
    Reader,
}

impl Role {
    /// Refuses what is not for it.
    ///
    /// # Errors
    /// A reader wants more than to look.
    pub fn check(self, request: &Request) -> Result<(), Error> {
        match (self, request.kind()) {
            (Role::Admin, _) | (Role::Reader, Kind::Look) => Ok(()),
            (Role::Reader, Kind::Check | Kind::Change | Kind::Act) => Err(Error::new(
                Code::NotPermitted,
                "you may look at this grid and change nothing, as a member of the group that control.readers names, or as a \
                 reader over the network; run this command as the user that runs the host (`sudo holdfast ...`), or come as \
                 an operator",
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn readers_look_and_admins_do() {
        let show = Request::VolumeShow { name: "v1".to_string() };
        let delete = Request::VolumeDelete { name: "v1".to_string(), force: false, now: false };
        Role::Reader.check(&show).unwrap();
        Role::Admin.check(&delete).unwrap();
        for refused in [&delete, &Request::NodeCut { node: 1 }, &Request::GridReload] {
            let error = Role::Reader.check(refused).unwrap_err().to_string();
            assert!(error.contains("control.readers") && error.contains("sudo holdfast"), "{error}");
        }
    }
}
