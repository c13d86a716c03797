{{/* An object from files/ with the chart's values applied; empty if a value disables it. Takes object and root. */}}
{{- define "mizzen.finished" -}}
{{- $object := .object -}}
{{- $values := .root.Values -}}
{{- $roles := list "ClusterRole" "ClusterRoleBinding" "Role" "RoleBinding" -}}
{{- $wanted := true -}}
{{- if eq $object.kind "ServiceAccount" }}{{ $wanted = $values.serviceAccount.create }}{{ end -}}
{{- if has $object.kind $roles }}{{ $wanted = $values.rbac.create }}{{ end -}}
{{- if $wanted }}
{{- $meta := dict "root" .root "component" (index $object.metadata.labels "app.kubernetes.io/component") -}}
{{- $_ := set $object.metadata "labels" (include "mizzen.labels" $meta | fromYaml) -}}
{{- $annotations := merge (dict) ($object.metadata.annotations | default dict) $values.commonAnnotations -}}
{{- if eq $object.kind "ServiceAccount" }}{{ $annotations = merge $annotations $values.serviceAccount.annotations }}{{ end -}}
{{- if eq $object.kind "Service" }}{{ $annotations = merge $annotations $values.operator.serviceAnnotations }}{{ end -}}
{{- with $annotations }}{{ $_ := set $object.metadata "annotations" . }}{{ end -}}
{{- if not $values.rbac.listSecrets }}{{ include "mizzen.unlisted" . }}{{ end -}}
{{- if eq $values.rbac.scope "namespace" }}{{ include "mizzen.namespaced" . }}{{ end -}}
{{- if eq $object.kind "Deployment" }}{{ include "mizzen.deployment" . }}{{ end -}}
{{ toYaml $object }}
{{- end }}
{{- end }}

{{/* Removes the rule that allows listing Secrets from a role. */}}
{{- define "mizzen.unlisted" -}}
{{- $kept := list -}}
{{- range .object.rules }}
{{- if not (and (has "secrets" .resources) (has "list" .verbs)) }}{{ $kept = append $kept . }}{{ end -}}
{{- end }}
{{- if $kept }}{{ $_ := set .object "rules" $kept }}{{ end -}}
{{- end }}

{{/* Turns a ClusterRole or ClusterRoleBinding into a Role or RoleBinding in the served namespace. */}}
{{- define "mizzen.namespaced" -}}
{{- $object := .object -}}
{{- if hasPrefix "Cluster" $object.kind }}
{{- $_ := set $object "kind" (trimPrefix "Cluster" $object.kind) -}}
{{- $_ := set $object.metadata "namespace" (include "mizzen.namespace" .root) -}}
{{- with $object.roleRef }}{{ $_ := set . "kind" "Role" }}{{ end -}}
{{- range $object.rules }}
{{- if has "clusterroles" .resources }}{{ $_ := set . "resources" (list "roles") }}{{ end -}}
{{- end }}
{{- end }}
{{- end }}

{{/* Applies structured values (lists and maps) to the operator's Deployment. */}}
{{- define "mizzen.deployment" -}}
{{- $values := .root.Values.operator -}}
{{- $template := .object.spec.template -}}
{{- $pod := $template.spec -}}
{{- $container := first $pod.containers -}}
{{- $labels := merge $template.metadata.labels $values.podLabels .root.Values.commonLabels -}}
{{- $_ := set $template.metadata "labels" $labels -}}
{{- with merge (dict) $values.podAnnotations .root.Values.commonAnnotations }}
{{- $_ := set $template.metadata "annotations" . -}}
{{- end -}}
{{- if kindIs "slice" $values.topologySpreadConstraints }}
{{- $_ := set $pod "topologySpreadConstraints" $values.topologySpreadConstraints -}}
{{- end -}}
{{- with $values.extraInitContainers }}{{ $_ := set $pod "initContainers" . }}{{ end -}}
{{- $_ := set $pod "volumes" (concat $pod.volumes $values.extraVolumes) -}}
{{- $_ := set $container "args" (concat $container.args $values.extraArgs) -}}
{{- $_ := set $container "env" (concat $container.env $values.extraEnv) -}}
{{- $_ := set $container "volumeMounts" (concat $container.volumeMounts $values.extraVolumeMounts) -}}
{{- $_ := set $pod "containers" (concat (list $container) $values.extraContainers) -}}
{{- end }}
